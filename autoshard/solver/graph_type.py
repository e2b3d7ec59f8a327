"""How compiled kernels see a record of arrays, such as `FactorGraph`: as the address of a list of places.

The list holds the address and the length of each array. Numba would pass a tuple of arrays as seven numbers for each of
them and count references to each, which was most of what it took to compile these kernels. Of an array of the record
they can read entries, whose index must not be negative, and the length.
"""

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, Signature, infer_global, signature
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_builtin,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)


class ColumnType(types.Type):
    """One array of a record: of one dimension, contiguous."""

    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(f"Column({dtype})")


class RecordType(types.Type):
    """A record of arrays.

    Attributes:
      columns: The name of each array, in order, and the type of its entries. All belong to the key under which numba
        keeps kernels on disk, so that none is read that was compiled for another layout.
    """

    def __init__(self, name: str, columns: tuple[tuple[str, types.Type], ...]) -> None:
        self.columns = columns
        super().__init__(name)

    @property
    def key(self) -> tuple:
        return self.name, self.columns


@register_model(RecordType)
class _RecordModel(models.PrimitiveModel):
    def __init__(self, manager: Any, record: RecordType) -> None:
        super().__init__(manager, record, ir.IntType(64).as_pointer())


@register_model(ColumnType)
class _ColumnModel(models.StructModel):
    def __init__(self, manager: Any, column: ColumnType) -> None:
        super().__init__(manager, column, [("data", types.CPointer(column.dtype)), ("length", types.intp)])


@unbox(RecordType)
def _unbox_record(record: RecordType, value: Any, c: Any) -> NativeValue:
    """The record's `address`, an int."""
    number = c.pyapi.object_getattr_string(value, "address")
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.bitcast(address, ir.IntType(64).as_pointer()), c.pyapi.c_api_error())


@infer_getattr
class _RecordAttributes(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, value: RecordType, attr: str) -> ColumnType | None:
        return next((ColumnType(dtype) for name, dtype in value.columns if name == attr), None)


@lower_getattr_generic(RecordType)
def _lower_column(context: Any, builder: Any, record: RecordType, address: Any, attr: str) -> Any:
    place = [name for name, _ in record.columns].index(attr)
    column = ColumnType(record.columns[place][1])
    pair = cgutils.create_struct_proxy(column)(context, builder)
    pair.data = builder.inttoptr(_constant(builder, address, 2 * place), pair.data.type)
    pair.length = _constant(builder, address, 2 * place + 1)
    return pair._getvalue()


def _constant(builder: Any, address: Any, index: int) -> Any:
    """A number of the record, which no kernel changes."""
    loaded = builder.load(builder.gep(address, [ir.IntType(64)(index)]))
    loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
    return loaded


@infer_global(len)  # pyright: ignore[reportOptionalCall]
class _ColumnLength(AbstractTemplate):
    metadata = {"target": "cpu"}  # more special than numba's own, so that it is asked first

    def generic(self, args: tuple, kws: dict) -> Signature | None:
        if len(args) == 1 and isinstance(args[0], ColumnType):
            return signature(types.intp, args[0])


@infer_global(operator.getitem)  # pyright: ignore[reportOptionalCall]
class _ColumnEntry(AbstractTemplate):
    metadata = {"target": "cpu"}

    def generic(self, args: tuple, kws: dict) -> Signature | None:
        if len(args) == 2 and isinstance(args[0], ColumnType) and isinstance(args[1], types.Integer):
            return signature(args[0].dtype, *args)


@lower_builtin(len, ColumnType)
def _lower_length(context: Any, builder: Any, sig: Signature, args: tuple) -> Any:
    return cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).length


@lower_builtin(operator.getitem, ColumnType, types.Integer)
def _lower_entry(context: Any, builder: Any, sig: Signature, args: tuple) -> Any:
    data = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).data
    index = context.cast(builder, args[1], sig.args[1], types.intp)
    return builder.load(builder.gep(data, [index]))
