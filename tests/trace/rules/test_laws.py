"""What every rule must satisfy, whatever the primitive."""

import math

from autoshard.graph.graph import Dims
from autoshard.trace.rules import rule_of
from autoshard.trace.rules.leaf import TensorType, leaf_of


def occurrences(tensors: tuple[Dims, ...], factor: int) -> int:
    return sum(dim.count(factor) for tensor in tensors for dim in tensor)


def check_tensor(tensor: TensorType, dims: Dims, sizes: list[int]) -> None:
    assert len(dims) == len(tensor.shape)
    flat = [factor for dim in dims for factor in dim]
    assert len(flat) == len(set(flat)), "a factor may occur once in a tensor"
    for size, dim in zip(tensor.shape, dims, strict=True):
        if dim:
            assert math.prod(sizes[factor] for factor in dim) == size > 1


def test_rules_are_well_formed(any_example):
    eqn = any_example.eqn
    rule, leaf = rule_of(eqn), leaf_of(eqn)
    sizes = [factor.size for factor in rule.factors]
    assert len(rule.operands) == len(leaf.operands) and len(rule.results) == len(leaf.results)
    for tensor, dims in zip(leaf.operands + leaf.results, rule.operands + rule.results, strict=True):
        check_tensor(tensor, dims, sizes)
    for number, factor in enumerate(rule.factors):
        in_operands, in_results = occurrences(rule.operands, number), occurrences(rule.results, number)
        assert in_operands + in_results > 0, "a factor without a dimension says nothing"
        assert (factor.reduction is not None) == (in_results == 0)
    assert rule.flops >= 0


def test_examples_of_the_table_come_from_the_table(example):
    assert rule_of(example.eqn).origin == "table"


def test_examples_of_the_fallback_come_from_shardy(fallback_example):
    assert rule_of(fallback_example.eqn).origin == "shardy"
