"""Gradients of convolution kernels are made where the program does, and what comes next waits for them."""

import jax
import jax.numpy as jnp
from jax import lax

KERNEL_BYTES = 4 * 3 * 3 * 64 * 64


def backward(w, x, y):
    """The gradient of a kernel, and right behind it that of what it was convolved with."""
    h, g = jnp.tanh(x), jnp.sin(y)
    convolved = lambda w, h: lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    gradient, onward = jax.vjp(convolved, w, h)[1](g)
    return w - gradient, onward


def test_a_kernel_s_gradient_is_made_before_the_next_convolution_gathers_its_kernel(formulated, mesh_of):
    """On two devices the partial sum takes 147 kB, though the operands that end with it take 8 kB each. It is there
    twice while it is transposed, and then once, to be reduced with the sum that the second convolution may leave. The
    kernel's copy takes as much, and is only there for that one.
    """
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    f = formulated(backward, (f32(3, 3, 64, 64), f32(4, 4, 4, 64), f32(4, 4, 4, 64)), mesh_of(2), donate=(0,))
    graph = f.program.graph
    first, second = (o.index for o in graph.operations if o.name == "conv_general_dilated")
    node = next(len(graph.arguments) + g.index for g in f.program.groups if g.operations[0] == first)
    waiting = [u for u, v in zip(f.problem.usages, f.buffers, strict=False) if v.value is None and u.node == node]
    spans = [(f.instants[u.start], f.instants[u.stop - 1], u.amounts.max()) for u in waiting]
    assert spans == [(first, first, KERNEL_BYTES)] * 2 + [(first + 1, second, KERNEL_BYTES)]
    copied = [u for u in f.problem.edge_usages if u.amounts.max() == KERNEL_BYTES]
    instants = {f.instants[at] for u in copied for at in range(u.start, u.stop)}
    assert second in instants and first not in instants
