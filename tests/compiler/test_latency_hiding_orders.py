"""What is ordered where collectives run behind kernels: who waits for whom, what is moved, and who tells of it."""

import jax
import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.compiler.hiding_spans import QUEUED_WITHIN
from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.compiler.orders import OrderKind, orders
from autoshard.compiler.read_in_turn import awaited_values
from autoshard.compiler.schedule import Schedule
from autoshard.graph.equation_plan import EquationPlan, evaluation_order
from autoshard.graph.layout import SpecEntries
from autoshard.trace.trace import trace

ROWS, COLUMNS, WHOLE = (("data",), ()), ((), ("data",)), ((), ())
HIDING = OrderingRules(schedule=Schedule.LATENCY_HIDING)


@pytest.fixture(autouse=True)
def _four_ahead(monkeypatch):
    """Copies are gathered up to four products ahead here, so that small programs have anchors."""
    monkeypatch.setattr("autoshard.compiler.prefetches.PREFETCH_DISTANCE", 4)


def found(fn, shapes, equations, arguments: list[SpecEntries], rules: OrderingRules = HIDING):
    """What a plan on four devices says of each equation, and the orders that people are told of."""
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    made = orderings(trace(fn, given).graph, equations, arguments, {"data": 4}, rules)(None)
    return made.equations, orders(made)


@pytest.mark.parametrize(("size", "is_held"), [(1024, True), (512, False)])
def test_a_weight_is_gathered_when_the_fourth_product_before_its_own_is_made(size, is_held):
    """Five layers, and the cast of the last one's weight: it is made before the first product, which is its anchor.
    The first four weights have no product four ahead of them. Copies of 1 MiB are left to the compiler."""

    def f(x, a, b, c, d, e):
        return (x @ a) @ b @ c @ d @ jnp.sin(e)  # equations 0 to 3, 4 (the sine), 5

    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    plans = {**dict.fromkeys((0, 1, 2, 3, 5), gathers), 4: EquationPlan(results=((0, ROWS),))}
    equations, told = found(f, [(8, size)] + [(size, size)] * 5, plans, [ROWS] * 6)
    assert {n: e.holds_back for n, e in equations.items() if e.holds_back} == ({0: ((5, 1),)} if is_held else {})
    assert {n: e.evaluated_at for n, e in equations.items() if e.evaluated_at} == ({4: -4} if is_held else {})
    order = evaluation_order([0, 1, 2, 3, 4, 5], equations)
    assert order == ([4, 0, 1, 2, 3, 5] if is_held else [0, 1, 2, 3, 4, 5])
    held = [(o.equation, o.tensor, o.size_bytes) for o in told if o.kind is OrderKind.HELD_BACK]
    assert held == [(5, "operand of dot_general", size * size * 4)] * is_held


def test_the_second_copy_of_a_weight_waits_for_its_first_reader_however_few_products_there_are():
    """Else both would read one copy, kept in between."""

    def f(x, a):
        return jnp.sin(x @ a) @ a  # equations 0, 1 (the sine), 2

    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    plans = {0: gathers, 1: EquationPlan(results=((0, ROWS),)), 2: gathers}
    equations, _ = found(f, [(8, 1024), (1024, 1024)], plans, [ROWS, ROWS])
    assert {n: e.holds_back for n, e in equations.items() if e.holds_back} == {0: ((2, 1),)}


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_weight_is_gathered_before_what_is_read_with_it_is_sent(is_sent):
    """Five layers; for the last product x is gathered too, or lies as the product reads it."""

    def f(x, a, e):
        return x @ a @ a @ a @ a @ e  # equations 0 to 4

    own = EquationPlan(operands=((0, (ROWS,)),), results=((0, ROWS),))
    last = EquationPlan(operands=((0, (WHOLE if is_sent else ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    shapes, plans = [(8, 1024), (1024, 1024), (1024, 1024)], {**dict.fromkeys(range(4), own), 4: last}
    equations, told = found(f, shapes, plans, [ROWS, WHOLE, ROWS])
    assert equations[0].holds_back == ((4, 1),)
    assert {n: e.gathered_first for n, e in equations.items() if e.gathered_first} == ({4: (1,)} if is_sent else {})
    assert [o.equation for o in told if o.kind is OrderKind.GATHERED_FIRST] == [4] * is_sent


@pytest.mark.parametrize(("fuses_products", "anchors"), [(False, {2: 6, 3: 7}), (True, {1: 6, 3: 7})])
def test_no_gather_waits_for_a_large_result_that_the_compiler_would_fuse(fuses_products, anchors):
    """Seven products, the second of which makes a result four times as large as what it reads: the sixth's weight waits
    for the first instead. The seventh's waits for the third in any case, which makes the stream small again.
    """

    def f(x, a, up, down, c, d, e, g):
        return (x * x) @ a @ up @ down @ c @ d @ e @ g  # equations 0, then 1 to 7

    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    own = EquationPlan(operands=((0, (ROWS,)),), results=((0, ROWS),))
    plans = {n: gathers if n in (6, 7) else own for n in range(1, 8)}
    square, rules = (1024, 1024), OrderingRules(schedule=Schedule.LATENCY_HIDING, fuses_products=fuses_products)
    shapes = [(8, 1024), square, (1024, 4096), (4096, 1024), *[square] * 4]
    equations, _ = found(f, shapes, plans, [ROWS, *[WHOLE] * 5, ROWS, ROWS], rules)
    assert {n: n + e.holds_back[0][0] for n, e in equations.items() if e.holds_back} == anchors


def test_xla_tpu_counts_no_product_that_nobody_waits_for_and_keeps_a_copy_that_is_read_again_at_once():
    """The gradient of a weight is no anchor: the last product's weight waits for what was made four products before
    that others read. Two products in turn that read one weight share its copy, which on GPUs is gathered twice."""

    def f(x, a, e, g):
        y = x @ a @ a @ a  # equations 0, 1, 2
        return (y @ e) @ e, y.T @ y, (y @ a) @ g  # 3, 4; 5, 6; 7, 8

    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    own = EquationPlan(operands=((0, (ROWS,)),), results=((0, ROWS),))
    summed = EquationPlan(operands=((0, (ROWS[::-1],)), (1, (ROWS,))), results=((0, WHOLE),))
    plans = {**dict.fromkeys((0, 1, 2, 7), own), 3: gathers, 4: gathers, 6: summed, 8: gathers}
    shapes, square = [(8, 1024)], (1024, 1024)
    held = {}
    for fuses_products in (False, True):
        rules = OrderingRules(schedule=Schedule.LATENCY_HIDING, fuses_products=fuses_products)
        equations, _ = found(f, [*shapes, square, square, square], plans, [ROWS, WHOLE, ROWS, ROWS], rules)
        held[fuses_products] = {n: [n + d for d, _ in e.holds_back] for n, e in equations.items() if e.holds_back}
    assert held == {False: {3: [4, 8]}, True: {1: [8]}}  # before 8 lie 0, 1, 2, 3, 7, and 4 and 6, which end there


def test_xla_tpu_gathers_weights_one_after_another_in_the_order_of_their_readers():
    """Three layers whose weights are gathered, the last one cast first: that is done before the second layer."""

    def f(x, a, b, c):
        return x @ a @ b @ jnp.sin(c)  # equations 0, 1; 2 (the sine), 3

    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    plans = {0: gathers, 1: gathers, 2: EquationPlan(results=((0, ROWS),)), 3: gathers}
    shapes, given = [(8, 1024)] + [(1024, 1024)] * 3, [ROWS] * 4
    rules = OrderingRules(schedule=Schedule.LATENCY_HIDING, fuses_products=True)
    equations, told = found(f, shapes, plans, given, rules)
    assert {n: e.gathers_next for n, e in equations.items() if e.gathers_next} == {0: ((1, 1, 1),), 1: ((1, 2, 1),)}
    assert evaluation_order([0, 1, 2, 3], equations) == [0, 2, 1, 3]
    assert [o.equation for o in told if o.kind is OrderKind.GATHERED_NEXT] == [1, 3]
    assert not any(e.gathers_next for e in found(f, shapes, plans, given)[0].values()), "XLA:GPU is told otherwise"


def test_a_compiler_that_fuses_products_orders_them_itself():
    """Readers of an operand of a gradient's product wait for that on GPUs, and on TPUs for nothing."""

    def f(x, a, b):
        hidden = jnp.tanh(x @ a)  # equations 0, 1
        return hidden @ b, hidden.T @ hidden, hidden @ b  # 2; 3, 4; 5

    own = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    summed = EquationPlan(operands=((0, (ROWS[::-1],)), (1, (ROWS,))), results=((0, WHOLE),))
    plans = {0: own, 1: EquationPlan(results=((0, ROWS),)), 2: own, 4: summed, 5: own}
    shapes, given = [(8, 1024), (1024, 1024), (1024, 1024)], [ROWS, WHOLE, WHOLE]
    rules = OrderingRules(schedule=Schedule.LATENCY_HIDING, fuses_products=True)
    is_told = [any(e.waits_for_part for e in found(f, shapes, plans, given, r)[0].values()) for r in (HIDING, rules)]
    assert is_told == [True, False]


def _followed(fn, shapes, plans, given, rules):
    """(made, reader, operand slot) of what is read only when something is summed."""
    equations, _ = found(fn, shapes, plans, given, rules)
    return {(n - d, n, slot) for n, e in equations.items() for d, slot in e.follows}, equations


@pytest.mark.parametrize(("is_widened", "recomputes"), [(False, True), (True, True), (False, False)])
def test_on_tpus_a_weight_that_is_read_eight_products_after_a_gradient_waits_for_its_sum(is_widened, recomputes):
    """A gradient, and twelve products in turn, where something is recomputed: no activation waits, so that no kernel is
    cut. What widens the gradient comes after, and XLA:GPU is told otherwise."""
    weights = 12

    def f(x, y, *layers):
        gradient = x.T @ x  # equations 0, 1
        gradient = gradient.astype(jnp.float64) if is_widened else gradient  # 2
        for layer in layers:
            y = y @ layer
        return gradient, jax.checkpoint(jnp.sin)(y) if recomputes else y

    first = 2 + is_widened
    own = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    summed = EquationPlan(operands=((0, (ROWS[::-1],)), (1, (ROWS,))), results=((0, ROWS),), scatters=(("data", 0),))
    plans = {1: summed, **{first + n: own for n in range(weights)}}
    shapes, given = [(64, 32), (64, 32)] + [(32, 32)] * weights, [ROWS, ROWS] + [WHOLE] * weights
    rules = OrderingRules(schedule=Schedule.LATENCY_HIDING, fuses_products=True)
    with jax.enable_x64(True):
        followed, equations = _followed(f, shapes, plans, given, rules)
        on_gpus, _ = _followed(f, shapes, plans, given, HIDING)
    assert followed == ({(1, first + 7, 1)} if recomputes else set()) and not on_gpus
    order = evaluation_order(list(range(first + weights)), equations)
    assert not is_widened or order.index(2) == order.index(first + 7) + 1


@pytest.mark.parametrize(("after", "waits"), [(7, False), (8, True)])
def test_on_tpus_a_checkpointed_layer_that_contains_the_eighth_product_waits(after, waits):
    def layer(y, *layers):
        for own in layers:
            y = y @ own
        return y

    def f(x, y, *layers):
        return x.T @ x, jax.checkpoint(layer)(y, *layers)  # equations 0, 1; 2

    shapes = [(64, 32), (64, 32)] + [(32, 32)] * after
    rules = OrderingRules(schedule=Schedule.LATENCY_HIDING, fuses_products=True)
    followed, _ = _followed(f, shapes, {}, [WHOLE] * len(shapes), rules)
    assert {(made, reader) for made, reader, _ in followed} == ({(1, 2)} if waits else set())


@pytest.mark.parametrize(("between", "anchors"), [(1, {0: 4, 4: 6}), (4, {0: 4, 5: 9})])
def test_no_copy_is_held_back_by_what_is_before_another_reader_of_the_same(between, anchors):
    """Five layers; the fifth reads the weight e, and so does the last, `between` products later. Its anchor is four
    products before it, but no earlier than the first reader of e: both would read one copy, kept in between.
    """

    def f(x, a, e):
        for w in (a, a, a, a, e, *[a] * between, e):
            x = x @ w
        return x

    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    own = EquationPlan(operands=((0, (ROWS,)),), results=((0, ROWS),))
    plans = {n: gathers if n in (4, 5 + between) else own for n in range(6 + between)}
    equations, _ = found(f, [(8, 1024), (1024, 1024), (1024, 1024)], plans, [ROWS, WHOLE, ROWS])
    held = {n: n + e.holds_back[0][0] for n, e in equations.items() if e.holds_back}
    assert held == anchors


def test_readers_of_an_operand_wait_for_the_gradient_of_a_weight():
    """The gradient of a layer's output is read by both products of the backward pass; x has no other reader."""

    def f(weight, x, gradient):
        of_weight = jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))  # equation 0
        return weight - of_weight, jax.lax.dot_general(gradient, weight, (((1,), (1,)), ((), ())))

    reads = EquationPlan(operands=((0, (ROWS,)), (1, (ROWS,))), results=((0, WHOLE),))
    equations, _ = found(f, [(8, 4), (8, 8), (8, 4)], {0: reads}, [WHOLE, ROWS, ROWS])
    assert equations[0].waits_for_part == (1,) and not equations[0].waits


@pytest.mark.parametrize("is_last", [False, True])
def test_the_sum_for_a_bias_is_made_before_the_next_product_or_the_result(is_last):
    """The sum of 256 rows sets them free; the product (or what a checkpointed layer hands on) waits for it."""

    def layer(x, y):
        of_bias = jnp.sum(x * y, axis=0)
        through = jnp.sin(x)
        return of_bias, through if is_last else through @ y[:4]

    def f(x, y):
        of_bias, out = jax.checkpoint(layer)(x, y)
        return of_bias, out @ y[:4]

    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 4), (256, 4))]
    graph = trace(f, given).graph
    named = {o.name: o.equation for o in graph.operations if o.name in ("reduce_sum", "sin")}
    product = next(o.equation for o in graph.operations if o.name == "dot_general")
    plans = {named["sin"]: EquationPlan(results=((0, ROWS),))}
    equations = orderings(graph, plans, [ROWS, ROWS], {"data": 4}, HIDING)(None).equations
    summed = equations[named["reduce_sum"]]
    after = named["reduce_sum"] + summed.evaluated_at
    if is_last:
        assert summed.holds_results == (1,) and not summed.holds_back and after > named["sin"]
    else:
        assert summed.holds_back == ((product - named["reduce_sum"], 0),) and after == product


def test_what_a_small_sum_is_multiplied_by_comes_with_it():
    """The gradient of a decay that is the negative of a parameter: its sum sets the rows free before the product."""

    def f(x, y, decay):
        of_decay = -decay * jnp.sum(x * y, axis=0)
        return of_decay, x @ y[:4]

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 4), (256, 4), (4,))]
    named = {o.name: o.equation for o in trace(f, shapes).graph.operations}
    equations, _ = found(f, [(256, 4), (256, 4), (4,)], {}, [ROWS, ROWS, WHOLE])
    summed = equations[named["reduce_sum"]]
    assert summed.holds_back == ((named["dot_general"] - named["reduce_sum"], 0),)
    assert equations[named["mul"]].evaluated_at


@pytest.mark.parametrize(
    ("nest", "is_read", "is_summed", "waits"),
    [
        (jax.checkpoint, False, False, False),
        (jax.checkpoint, True, False, True),
        (jax.checkpoint, True, True, False),
        (jax.jit, True, False, False),
    ],
)
def test_what_a_layer_hands_on_to_products_waits_for_its_last_product(nest, is_read, is_summed, waits):
    """Of two products the first makes a result by itself. What reads that would not wait for the second otherwise. A
    sum over devices does not wait, as XLA adds others to it first, nor what may be kept for the backward pass."""

    def f(x, y):
        first, last = nest(lambda x, y: (x @ y, jnp.sin(x) @ y))(x, y)
        return first @ y if is_read else first, last @ y

    graph = trace(f, [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 4), (4, 4))]).graph
    first, last = [o.equation for o in graph.operations if o.name == "dot_general"][:2]
    summed = EquationPlan(operands=((0, (COLUMNS,)), (1, (ROWS,))), results=((0, WHOLE),))
    plans = {first: summed} if is_summed else {}
    equations = orderings(graph, plans, [WHOLE, WHOLE], {"data": 4}, HIDING)(None).equations
    assert first < last
    assert {n: e.holds_results for n, e in equations.items() if e.holds_results} == ({last: (0,)} if waits else {})


@pytest.mark.parametrize(
    ("rows", "of_what", "waits"),
    [(4096, "error", True), (64, "error", False), (4096, "update", False)],
    ids=["loss", "small", "norm of what is there last"],
)
def test_a_loss_is_summed_before_the_next_product(rows, of_what, waits):
    """What it sums would be kept for it, as nothing but the program's result waits for it; 8 MB of 4096 rows."""

    def f(x, y, w):
        error = x @ w - y
        updated = jnp.sin(y)
        loss = jnp.sum(jnp.square(error if of_what == "error" else updated))
        return loss, (2 * error).T @ x, updated

    equations, _ = found(f, [(rows, 512), (rows, 512), (512, 512)], {}, [ROWS, ROWS, WHOLE])
    graph = trace(f, [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 512), (rows, 512), (512, 512))]).graph
    summed = next(o.equation for o in graph.operations if o.name == "reduce_sum")
    last = [o.equation for o in graph.operations if o.name == "dot_general"][-1]
    held = equations[summed].holds_back if summed in equations else ()
    assert [summed + later for later, _ in held] == ([last] if waits else [])


def test_a_large_sum_is_reduced_before_the_fourth_product_after_it():
    """The partial sum (8192, 961) takes 31.5 MB, too much to be reduced with others: three products hide it."""

    def f(weight, x, gradient, a, b):
        of_weight = jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))  # equation 0
        return of_weight, (gradient @ a) @ b @ b @ b  # equations 1 to 4

    scattered = EquationPlan(operands=((0, (ROWS,)), (1, (ROWS,))), results=((0, ROWS),), scatters=(("data", 0),))
    shapes = [(8192, 961), (64, 8192), (64, 961), (961, 8), (8, 8)]
    equations, told = found(lambda *args: (*f(*args), args[0]), shapes, {0: scattered}, [ROWS] * 3 + [WHOLE] * 2)
    assert not any(e.follows for e in equations.values()), "nothing is behind the fourth product"
    behind = lambda *args: (f(*args)[0], jnp.sin(f(*args)[1]))
    equations, told = found(behind, shapes, {0: scattered}, [ROWS] * 3 + [WHOLE] * 2)
    assert {n: e.follows for n, e in equations.items() if e.follows}
    assert OrderKind.REDUCED_BEFORE in {o.kind for o in told}


def before_products(form=lambda of_weight: of_weight, num_products=14):
    """A function whose first equation makes a gradient, which `form` is applied to, before products without it."""

    def f(weight, x, gradient, a, b):
        of_weight = form(jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ()))))
        y = gradient @ a
        for _ in range(num_products - 1):
            y = y @ b
        return of_weight, jnp.sin(y), weight

    return f


@pytest.mark.parametrize(("split", "within"), [(("data",), 4), (("data", "tensor"), 12)])
def test_a_sum_over_one_axis_and_then_over_another_has_more_products_to_hide_behind(split, within):
    """The partial sum (8192, 1024) is scattered over four devices, and what is left, where they have another axis,
    summed over two."""

    rows = (split, ())
    scattered = EquationPlan(operands=((0, (rows,)), (1, (rows,))), results=((0, ROWS),), scatters=(("data", 0),))
    shapes = [(8192, 1024), (64, 8192), (64, 1024), (1024, 8), (8, 8)]
    graph = trace(before_products(), [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).graph
    equations = orderings(graph, {0: scattered}, [ROWS] * 5, {"data": 4, "tensor": 2}, HIDING)(None).equations
    assert {n: e.follows for n, e in equations.items() if e.follows} == {4: ((4, 0),)}, "what memory is predicted for"
    freed = {n: e.gathered_freely for n, e in equations.items()}
    assert {n: e.follows for n, e in freed.items() if e.follows} == {within: ((within, 0),)}


@pytest.mark.parametrize(
    ("scatters", "rows", "is_alone"),
    [((("data", 0),), 2**11, True), ((("data", 0),), 2**10, False), ((), 2**11, True), ((), 2**10, False)],
)
def test_all_sums_that_are_joined_with_none_are_made_in_turn(scatters, rows, is_alone):
    """The partial sum (rows, 1024) takes 8 or 4 MiB: scattered over four devices it leaves 2 MiB or 1, joined up to 1;
    all-reduced it is joined up to 4. It is there as late as is predicted, 24 products later, and sooner where there is
    memory to spare; all-reduced it is given more time."""

    result = ROWS if scatters else WHOLE
    summed = EquationPlan(operands=((0, (ROWS,)), (1, (ROWS,))), results=((0, result),), scatters=scatters)
    shapes = [(rows, 1024), (64, rows), (64, 1024), (1024, 8), (8, 8)]
    graph = trace(before_products(num_products=30), [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).graph
    equations = orderings(graph, {0: summed}, [ROWS] * 5, {"data": 4}, HIDING)(None).equations
    bounded = {n: e.follows for n, e in equations.items() if e.follows}
    assert bounded == ({QUEUED_WITHIN: ((QUEUED_WITHIN, 0),)} if is_alone else {})
    within = 4 if scatters else 12
    freed = {n: e.gathered_freely.follows for n, e in equations.items() if e.follows_with_room}
    assert freed == ({within: ((within, 0),)} if is_alone else {})


@pytest.mark.parametrize(("has_room", "within"), [(False, 4), (True, 12)])
def test_what_is_made_of_a_sum_comes_behind_what_waits_for_it(has_room, within):
    """The sine of a sum over two axes. Were it made before, it would read the sum itself: of what the product gets
    together with its own operand, which ties the two, nothing would be read, and XLA would drop the tie."""

    rows = (("data", "tensor"), ())
    scattered = EquationPlan(operands=((0, (rows,)), (1, (rows,))), results=((0, ROWS),), scatters=(("data", 0),))
    shapes = [(8192, 1024), (64, 8192), (64, 1024), (1024, 8), (8, 8)]
    graph = trace(before_products(jnp.sin), [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).graph
    plans = orderings(graph, {0: scattered}, [ROWS] * 5, {"data": 4, "tensor": 2}, HIDING)(None).equations
    plans = {n: e.gathered_freely if has_room else e for n, e in plans.items()}
    waiting = within + 1
    assert {n: e.follows for n, e in plans.items() if e.follows} == {waiting: ((waiting, 0),)}
    order = evaluation_order(range(17), plans)
    assert order.index(1) == order.index(waiting) + 1


def test_without_orders_of_gathers_products_and_their_sums_stay_ordered():
    every = dict(waits=(1,), waits_for_part=(0,), holds_back=((1, 0),), holds_results=(0,), follows=((1, 0),))
    others = dict(delayed=(1,), gathered_first=(0,), in_turn=((1, 0),), opened=(0,), follows_with_room=((3, 0),))
    plan = EquationPlan(**every, **others, evaluated_at=2, evaluated_with_room=4)
    assert plan.gathered_freely == EquationPlan(waits_for_part=(0,), follows=((3, 0),), evaluated_at=4)


def test_a_large_sum_is_reduced_before_the_checkpointed_layer_that_contains_the_fourth_product():
    """The layer of three products is behind one other: it waits for the sum, as its third product would."""

    def f(weight, x, gradient, a, b):
        of_weight = jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))
        layer = jax.checkpoint(lambda y: ((y @ b) @ b) @ b)
        return of_weight, jnp.sin(layer(gradient @ a)), weight

    scattered = EquationPlan(operands=((0, (ROWS,)), (1, (ROWS,))), results=((0, ROWS),), scatters=(("data", 0),))
    shapes = [(8192, 961), (64, 8192), (64, 961), (961, 8), (8, 8)]
    equations, _ = found(f, shapes, {0: scattered}, [ROWS] * 3 + [WHOLE] * 2)
    assert {n: e.follows for n, e in equations.items() if e.follows} == {2: ((2, 1),)}, "by what it is handed"


def test_of_two_gradients_that_share_an_operand_the_smaller_one_is_made_first():
    """Gradients of probabilities (8, 8) and of values (8, 2), each of which another product needs."""

    def f(gradient, values, probabilities, w):
        of_probabilities = jax.lax.dot_general(gradient, values, (((1,), (1,)), ((), ())))  # equation 0
        of_values = jax.lax.dot_general(probabilities, gradient, (((0,), (0,)), ((), ())))  # equation 1
        return of_probabilities @ w, of_values @ w[:2]

    equations, told = found(f, [(8, 2), (8, 2), (8, 8), (8, 8)], {}, [WHOLE] * 4)
    assert equations[1].evaluated_at == -1
    assert [o.equation for o in told if o.kind is OrderKind.MOVED] == [1]
    alone = lambda *args: f(*args)[0]
    assert not found(alone, [(8, 2), (8, 2), (8, 8), (8, 8)], {}, [WHOLE] * 4)[0]


def test_what_is_added_to_a_table_is_awaited_by_no_product():
    """The sine is added to rows of a table, and the cosine is multiplied."""

    def f(table, at, x, w):
        return table.at[at].add(jnp.sin(x)), jnp.cos(x) @ w

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (4,), (4, 8), (8, 8))]
    shapes[1] = jax.ShapeDtypeStruct((4,), jnp.int32)
    graph = trace(f, shapes).graph
    sine, cosine = (next(o.results[0] for o in graph.operations if o.name == name) for name in ("sin", "cos"))
    assert {sine, cosine} <= awaited_values(graph, by_products=False)
    assert {sine, cosine} & awaited_values(graph, by_products=True) == {cosine}


def test_equations_are_evaluated_where_the_plan_says():
    """5 before 2, and 1, 4 before 5: 1 and 4 keep the program's order."""
    plans = {5: EquationPlan(evaluated_at=-3), 4: EquationPlan(evaluated_at=1), 1: EquationPlan(evaluated_at=4)}
    assert evaluation_order([0, 1, 2, 3, 4, 5], plans) == [0, 1, 4, 5, 2, 3]


def test_the_least_memory_is_ordered_otherwise():
    """Nothing of this is said there."""
    graph = planned(lambda x, a, b, c: x @ a @ b @ c, [(8, 8)] * 4, {}, {"data": 4}).graph
    gathers = EquationPlan(operands=((0, (ROWS,)), (1, (WHOLE,))), results=((0, ROWS),))
    plans = dict.fromkeys(range(3), gathers)
    kept = orderings(graph, plans, [ROWS] * 4, {"data": 4}, OrderingRules())(None).equations
    assert not any(e.holds_back or e.evaluated_at or e.follows or e.holds_results for e in kept.values())
