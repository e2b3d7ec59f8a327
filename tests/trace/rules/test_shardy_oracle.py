"""Shardy as a witness: every factor that the table states, Shardy states too, unless a reason is given here."""

import pytest
from jax.extend.mlir.dialects import sdy

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules import rule_of
from autoshard.trace.rules.composition import compose
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.shardy import annotated_module

NO_RULE = "chlo operations carry no Shardy rule before they are decomposed; execution is tested"
MASKED = (
    "JAX masks indices out of bounds after the gather, which one rule cannot say; XLA sums before: execution is tested"
)
BLOCKED = "the composition blocks convolutions and transforms; compared below with the rule as it stands"
LOOPS = "lowered to a loop that ends when all elements have converged, which ties them; by shards it does not"
ONE_ROW = "Shardy replicates an indexed dimension that is kept with size 1; XLA splits it: execution is tested"
PLACED = "Shardy keeps a dimension whole along which a place is searched; execution compares places: it is tested"

EXCEPTIONS = {
    "argmax": PLACED,
    "argmin_of_ties": PLACED,
    "argmax_of_bools": PLACED,
    "argmax_bf16": PLACED,
    "erf": NO_RULE,
    "erf_inv": NO_RULE,
    "embedding_fill": MASKED,
    "label_logits": MASKED,
    "cache_rows": ONE_ROW,
    "conv": BLOCKED,
    "conv_kernel_gradient": BLOCKED,
    "conv_depthwise": BLOCKED,
    "conv_grouped": BLOCKED,
    "conv_grouped_kernel_gradient": BLOCKED,
    "fft": BLOCKED,
    "fft_planes": BLOCKED,
    "top_k": NO_RULE,
    "top_k_rows": NO_RULE,
    "igamma": LOOPS,
}
"""Examples of which some factor of the table is not found in Shardy's rule, with the reason."""

LATER_EXCEPTIONS = {"update_row": ONE_ROW}
"""Exceptions only since the Shardy of JAX 0.12."""


def places(rule: FactorRule) -> set[tuple]:
    """Each factor as its size, its reduction and all places where it stands: tensor, dimension, factors right of it."""
    found = set()
    for number, factor in enumerate(rule.factors):
        where = []
        for index, tensor in enumerate(rule.operands + rule.results):
            for axis, dim in enumerate(tensor):
                if number in dim:
                    minor = 1
                    for right in dim[dim.index(number) + 1 :]:
                        minor *= rule.factors[right].size
                    where.append((index, axis, minor))
        found.add((factor.size, factor.reduction, tuple(where)))
    return found


def shardy_places(eqn) -> set[tuple]:
    module = annotated_module(eqn)
    with module.context:
        rule = compose(module, leaf_of(eqn))
    return set() if rule is None else places(rule)


def test_every_factor_is_shardys(example):
    eqn = example.eqn
    unknown = places(rule_of(eqn)) - shardy_places(eqn)
    if example.name in EXCEPTIONS:
        assert unknown, "the exception is no longer needed"
    elif example.name not in LATER_EXCEPTIONS:
        assert not unknown


@pytest.mark.parametrize("name", [name for name, reason in EXCEPTIONS.items() if reason == BLOCKED])
def test_factors_of_blocked_operations_are_shardys(catalogue, name):
    eqn = catalogue[name].eqn
    module = annotated_module(eqn)
    with module.context:
        (operation,) = [
            op.operation
            for op in module.body.operations[0].regions[0].blocks[0].operations
            if op.operation.name in ("stablehlo.convolution", "stablehlo.fft")
        ]
        rule = sdy.OpShardingRuleAttr(operation.attributes["sdy.sharding_rule"])
        barred = {*rule.permutation_factors, *rule.need_replication_factors, *rule.blocked_propagation_factors}
        stated: dict[int, list[tuple]] = {}
        for index, mapping in enumerate([*rule.operand_mappings, *rule.result_mappings]):
            for axis, dim in enumerate(sdy.TensorMappingAttr(mapping).dim_mappings):
                for factor in sdy.DimMappingAttr(dim).factor_indices:
                    stated.setdefault(factor, []).append((index, axis))
        allowed = {
            (rule.factor_sizes[factor], factor in rule.reduction_factors, tuple(where))
            for factor, where in stated.items()
            if factor not in barred
        }
    own = {
        (size, reduction is not None, tuple((index, axis) for index, axis, _ in where))
        for size, reduction, where in places(rule_of(eqn))
    }
    assert own and own <= allowed
