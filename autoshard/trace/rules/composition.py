"""Composes the sharding rules that Shardy states for the operations of a StableHLO module into one.

The rules are read from the attribute `sdy.sharding_rule`. Nested functions, loops and branches are followed; every
visit of a function has indices of its own. An index survives as a factor only if it can be split with no communication
but one reduction of the module's only result: what any operation permutes, replicates, blocks, combines on the way,
or handles without a rule, must stay whole.
"""

import dataclasses
import math

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from autoshard.graph.graph import Dims, FactorRule
from autoshard.trace.rules.index_forest import IndexForest
from autoshard.trace.rules.iteration_space import SHARDY, WHOLE, IterationSpace
from autoshard.trace.rules.leaf import Leaf

_Tensor = list[list[int]]
"""The indices of every dimension, major to minor."""

_RULE = "sdy.sharding_rule"
_SOURCES = frozenset({"stablehlo.constant", "stablehlo.iota"})
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
_NOT_PARTITIONED = frozenset({"stablehlo.convolution", "stablehlo.fft", "stablehlo.rng", "stablehlo.rng_bit_generator"})
"""Operations for which Shardy has a rule that XLA's partitioner cannot always execute without gathering."""

_SUMS = frozenset({"stablehlo.dot_general", "stablehlo.gather"})
_COMBINERS = {
    "stablehlo.add": "add",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.multiply": "mul",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}
_MOVEMENT = frozenset(
    f"stablehlo.{name}"
    for name in """bitcast_convert broadcast_in_dim concatenate convert dynamic_slice dynamic_update_slice gather pad
    reshape reverse slice transpose""".split()
)


class ModuleFormError(Exception):
    """The module is not of a form that can be composed; never leaves `autoshard.trace.rules`."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reducer:
    """An operation that combines elements: how, and the tensor that it gives."""

    combiner: str | None
    result: _Tensor


def _combiner(operation: ir.Operation) -> str | None:
    """How an operation combines elements along its reduction factors; None if that is not one of the known ways."""
    if operation.name in _SUMS:
        is_bool = str(ir.ShapedType(operation.results[0].type).element_type) == "i1"
        return "or" if is_bool else "add"
    if operation.name not in ("stablehlo.reduce", "stablehlo.scatter") or len(operation.results) != 1:
        return None
    body = list(operation.regions[0].blocks[0].operations)
    if len(body) != 2:
        return None
    combiner = _COMBINERS.get(body[0].operation.name)
    is_bool = str(ir.ShapedType(operation.results[0].type).element_type) == "i1"
    return {"add": "or", "mul": "and"}.get(combiner or "", combiner) if is_bool else combiner


def _shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


class _Composer:
    """Walks a module and ties the indices of its operations."""

    def __init__(self, module: ir.Module) -> None:
        self.forest = IndexForest()
        self.tensors: list[_Tensor] = []
        self.reducers: list[_Reducer] = []
        self.has_unknown = False
        self.flops = 0.0
        self._functions = {
            ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }

    def fresh(self, shape: tuple[int, ...]) -> _Tensor:
        tensor = [[self.forest.new(size)] for size in shape]
        self.tensors.append(tensor)
        return tensor

    def tie(self, left: _Tensor, right: _Tensor) -> None:
        for dim, other in zip(left, right, strict=True):
            self.forest.tie(dim, other)

    def block_tensors(self, tensors: list[_Tensor]) -> None:
        for tensor in tensors:
            for dim in tensor:
                self.forest.mark_whole(dim)

    def main(self) -> tuple[list[_Tensor], list[_Tensor]]:
        """Walks the entry function; returns its arguments and results."""
        block = self._functions["main"].regions[0].blocks[0]
        arguments = [self.fresh(_shape(argument)) for argument in block.arguments]
        return arguments, self._walk(block, arguments, {})

    def _walk(self, block: ir.Block, arguments: list[_Tensor], outer: dict[ir.Value, _Tensor]) -> list[_Tensor]:
        """Walks a block; returns what its terminator hands back."""
        known = dict(outer)
        known.update(zip(block.arguments, arguments, strict=True))
        for operation in block.operations:
            operation = operation.operation
            operands = [known[operand] for operand in operation.operands]
            if operation.name in ("func.return", "stablehlo.return"):
                return operands
            known.update(zip(operation.results, self._apply(operation, operands, known), strict=True))
        raise ModuleFormError("a block ends without a return")

    def _apply(self, operation: ir.Operation, operands: list[_Tensor], known: dict[ir.Value, _Tensor]) -> list[_Tensor]:
        """Ties the operands of an operation to new tensors for its results, and returns these."""
        name = operation.name
        if name in _CALLS:
            callee = self._functions[ir.FlatSymbolRefAttr(operation.attributes[_CALLS[name]]).value]
            return self._walk(callee.regions[0].blocks[0], operands, {})
        if name == "stablehlo.while":
            for region in operation.regions:
                returned = self._walk(region.blocks[0], operands, known)
                if len(returned) == len(operands) and region is not operation.regions[0]:
                    for carried, tensor in zip(operands, returned, strict=True):
                        self.tie(carried, tensor)
            return operands
        if name in ("stablehlo.case", "stablehlo.if"):
            branches = [self._walk(region.blocks[0], [], known) for region in operation.regions]
            for branch in branches[1:]:
                for tensor, other in zip(branches[0], branch, strict=True):
                    self.tie(tensor, other)
            return branches[0]
        results = [self.fresh(_shape(result)) for result in operation.results]
        if name in _SOURCES:
            return results
        if name == "stablehlo.optimization_barrier":
            return operands
        if name in _NOT_PARTITIONED or _RULE not in operation.attributes:
            self.has_unknown = True
            self.block_tensors(operands + results)
            return results
        self._apply_rule(operation, operands, results)
        return results

    def _apply_rule(self, operation: ir.Operation, operands: list[_Tensor], results: list[_Tensor]) -> None:
        rule = sdy.OpShardingRuleAttr(operation.attributes[_RULE])
        sizes = list(rule.factor_sizes)
        factors = [self.forest.new(size) for size in sizes]
        for group in (rule.permutation_factors, rule.need_replication_factors, rule.blocked_propagation_factors):
            self.forest.mark_whole([factors[factor] for factor in group])
        reduced = list(rule.reduction_factors)
        if reduced:
            self.reducers.append(_Reducer(_combiner(operation), results[0]))
            for factor in reduced:
                self.forest.mark_reduced(factors[factor], len(self.reducers) - 1)
        mappings = [*rule.operand_mappings, *rule.result_mappings]
        for tensor, mapping in zip(operands + results, mappings, strict=True):
            dims = sdy.TensorMappingAttr(mapping).dim_mappings
            mapped = [[factors[factor] for factor in sdy.DimMappingAttr(dim).factor_indices] for dim in dims]
            self.tie(tensor, mapped)
            self.tensors.append(mapped)
        if operation.name == "stablehlo.dynamic_update_slice":
            self._block_partial_updates(operation, operands[0])
        if operation.name == "stablehlo.custom_call":
            self._block_result_only(operands, results)
        if operation.name not in _MOVEMENT:
            if operation.name == "stablehlo.dot_general":
                self.flops += 2.0 * math.prod(sizes)
            else:
                self.flops += max(math.prod(_shape(value)) for value in (*operation.operands, *operation.results))

    def _block_partial_updates(self, operation: ir.Operation, operand: _Tensor) -> None:
        """Blocks the dimensions that an update covers in part, but by more than one element.

        Shardy lets these be split, but XLA's partitioner gathers them.
        """
        shape, update_shape = _shape(operation.operands[0]), _shape(operation.operands[1])
        for dim, size, update_size in zip(operand, shape, update_shape, strict=True):
            if update_size not in (1, size):
                self.forest.mark_whole(dim)

    def _block_result_only(self, operands: list[_Tensor], results: list[_Tensor]) -> None:
        """Blocks what a custom call makes anew, since its rule is known to tell of batch dimensions only."""
        given = {leaf for tensor in operands for dim in tensor for leaf in self.forest.leaves(dim)}
        for tensor in results:
            for dim in tensor:
                self.forest.mark_whole([leaf for leaf in self.forest.leaves(dim) if leaf not in given])


def _logical(composer: _Composer, tensors: list[_Tensor], shapes: list[tuple[int, ...]]) -> list[_Tensor]:
    """Cuts tensors to the dimensions that the equation shows; those of a random key's words must stay whole."""
    cut = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        composer.block_tensors([tensor[len(shape) :]])
        cut.append(tensor[: len(shape)])
    return cut


def _close_whole(composer: _Composer, outside: list[_Tensor]) -> None:
    """Marks what must stay whole because of its company.

    An index that occurs twice in a tensor. One that is not the major one of a dimension inside the module, unless the
    dimension can be seen from outside (whoever splits it then knows that the major ones come first). One to the right
    of an index that is whole, in the same dimension; and from outside, one that shares a dimension with such an index,
    so that a dimension is either whole or made of factors entirely.
    """
    forest = composer.forest
    visible = {tuple(forest.leaves(dim)) for tensor in outside for dim in tensor}
    for tensor in composer.tensors:
        dims = [forest.leaves(dim) for dim in tensor]
        flat = [leaf for dim in dims for leaf in dim]
        forest.mark_whole([leaf for leaf in flat if flat.count(leaf) > 1])
        for dim in dims:
            if tuple(dim) not in visible:
                forest.mark_whole(dim[1:])
    changed = True
    while changed:
        changed = False
        for tensor in composer.tensors:
            for dim in map(forest.leaves, tensor):
                states = [forest.is_whole(leaf) for leaf in dim]
                first = 0 if tuple(dim) in visible else states.index(True) if True in states else len(dim)
                if any(states) and not all(states[first:]):
                    forest.mark_whole(dim[first:])
                    changed = True


def compose(module: ir.Module, leaf: Leaf) -> FactorRule | None:
    """Composes the rules of a module's operations.

    Args:
      module: A module on which the pass `sdy-populate-op-sharding-rules` was run; its function `main` takes the
        operands of the equation and returns its results.
      leaf: The equation that was lowered.

    Returns:
      The rule of the whole, or None if nothing can be split and some operation had no rule.

    Raises:
      ModuleFormError: The module has a form that is not understood.
    """
    composer = _Composer(module)
    arguments, returned = composer.main()
    if len(arguments) != len(leaf.operands) or len(returned) != len(leaf.results):
        raise ModuleFormError("the module's signature is not that of the equation")
    operands = _logical(composer, arguments, [operand.shape for operand in leaf.operands])
    results = _logical(composer, returned, [result.shape for result in leaf.results])
    forest = composer.forest

    in_results = {index for tensor in results for dim in tensor for index in forest.leaves(dim)}
    combiners: dict[int, str] = {}
    for index in {index for tensor in composer.tensors for dim in tensor for index in forest.leaves(dim)}:
        reducers = [composer.reducers[number] for number in forest.reduced_by(index)]
        if index in in_results:
            if reducers:
                forest.mark_whole([index])
            continue
        is_last = len(reducers) == 1 and len(returned) == 1 and returned[0] is reducers[0].result
        if is_last and reducers[0].combiner is not None:
            combiners[index] = reducers[0].combiner
        else:
            forest.mark_whole([index])
    _close_whole(composer, operands + results)

    space = IterationSpace()
    factors: dict[int, tuple[int, ...]] = {}

    def dims_of(tensor: _Tensor) -> Dims:
        dims = []
        for dim in map(forest.leaves, tensor):
            made_of: tuple[int, ...] = WHOLE
            for index in dim:
                if not forest.is_whole(index):
                    if index not in factors:
                        factors[index] = space.factor(forest.size(index), combiners.get(index))
                    made_of += factors[index]
            dims.append(made_of)
        return tuple(dims)

    operand_dims = tuple(map(dims_of, operands))
    result_dims = tuple(map(dims_of, results))
    if composer.has_unknown and not factors:
        return None
    return space.close(operand_dims, result_dims, flops=composer.flops, is_heavy=True, origin=SHARDY)
