"""Pieces of a graph are compiled once for each form of inputs and each setting, as Dynamo would compile them."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import fx, nn
from torch._guards import TracingContext

from lowtide.runtime.compile.cutting import NoRegionsError, Piece
from lowtide.runtime.compile.pieces import PieceFunction, forget_pieces

WIDTH = 4


class Recording:
    """Compiles with AOTAutograd, and keeps what each compilation was shown."""

    is_kept = True

    def __init__(self) -> None:
        self.shapes: list[list[torch.Size]] = []
        self.devices: set[str] = set()
        self.fixed: list[list[int]] = []

    def compiled_graph(self, graph, inputs):
        def forward_compiler(traced, _):
            placeholders = traced.graph.find_nodes(op="placeholder")
            self.shapes.append([node.meta["val"].shape for node in placeholders])
            self.fixed.append(TracingContext.get().fw_metadata.static_input_indices)
            return make_boxed_func(traced.forward)

        self.devices.add(torch.rand(3).device.type)  # a compiler may try kernels on random inputs
        return aot_module_simplified(graph, inputs, forward_compiler)


class Failing:
    is_kept = True

    def __init__(self, error: Exception) -> None:
        self.error = error

    def compiled_graph(self, graph, inputs):
        raise self.error


def piece_of(operation=torch.sigmoid, key: str | None = "one") -> Piece:
    """A weight times an operation on an input."""
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    product = graph.call_function(torch.mul, (weight, graph.call_function(operation, (x,))))
    graph.output((product,))
    return Piece(1, fx.GraphModule(nn.Module(), graph), ("weight",), ("x",), ("product",), key)


def images(**options) -> torch.Tensor:
    return torch.arange(2.0 * WIDTH, **options).reshape(2, WIDTH)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    forget_pieces()


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.full((WIDTH,), 2.0))


def test_a_piece_is_compiled_once_for_each_form_and_setting(weight) -> None:
    compiler, x = Recording(), images()
    function = PieceFunction(piece_of(), compiler)

    def num_compiled_by(*args) -> int:
        before = len(compiler.shapes)
        for _ in range(2):
            (found,) = function([weight], args)
            assert torch.equal(found, weight * torch.sigmoid(args[0]))
            assert found.requires_grad == torch.is_grad_enabled()
        return len(compiler.shapes) - before

    assert num_compiled_by(x) == 1
    assert num_compiled_by(x.clone()) == 0
    assert num_compiled_by(x.t().contiguous().t()) == 1  # other strides
    assert num_compiled_by(x[:1]) == 1
    assert num_compiled_by(x.double()) == 1
    assert num_compiled_by(x.clone().requires_grad_()) == 1
    with torch.no_grad():
        assert num_compiled_by(x) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert num_compiled_by(x) == 1
    assert num_compiled_by(x) == 0


def test_equal_pieces_share_what_is_compiled_and_no_others_do(weight) -> None:
    compiler, x = Recording(), images()
    for piece in (piece_of(), piece_of()):
        PieceFunction(piece, compiler)([weight], (x,))
    assert len(compiler.shapes) == 1
    PieceFunction(piece_of(), compiler)([nn.Parameter(torch.ones(()))], (x,))  # a weight of another form
    frozen = nn.Parameter(weight.detach().clone(), requires_grad=False)
    assert not PieceFunction(piece_of(), compiler)([frozen], (x,))[0].requires_grad
    PieceFunction(piece_of(torch.tanh, "another"), compiler)([weight], (x,))
    PieceFunction(piece_of(), Recording())([weight], (x,))
    for _ in range(2):
        PieceFunction(piece_of(key=None), compiler)([weight], (x,))
    assert len(compiler.shapes) == 6
    PieceFunction(piece_of(), compiler)([weight[None]], (weight[None],))  # one memory
    PieceFunction(piece_of(), compiler)([weight[None]], (weight.detach().clone()[None].requires_grad_(),))
    assert len(compiler.shapes) == 8
    inside = torch.full((1 + WIDTH,), 2.0)
    PieceFunction(piece_of(), compiler)([nn.Parameter(inside[1:])], (x,))  # begins where kernels read more slowly
    assert len(compiler.shapes) == 9


def test_compiling_sees_numbers_for_shapes_and_leaves_random_numbers_and_modes_alone(weight) -> None:
    compiler = Recording()
    function = PieceFunction(piece_of(), compiler)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.device("meta"):  # a default device, which is a mode
        function([weight], (images(device="cpu"),))
        assert torch.empty(1).is_meta
    function([weight], (images()[:1],))
    assert torch.equal(torch.get_rng_state(), before)
    assert compiler.devices == {"cpu"}
    sizes = [size for shapes in compiler.shapes for shape in shapes for size in shape]
    assert len(sizes) == 6
    assert all(type(size) is int for size in sizes)


def test_compiling_sees_which_inputs_are_parameters(weight) -> None:
    compiler = Recording()
    function = PieceFunction(piece_of(), compiler)
    function([weight], (images(),))
    function([weight], (weight,))  # torch takes equal inputs for one
    assert compiler.fixed == [[0], []]


def test_what_was_compiled_stays_where_the_same_fails_in_other_modes(weight) -> None:
    compiler = Recording()
    PieceFunction(piece_of(), compiler)([weight], (images(),))
    compile_graph, compiler.compiled_graph = compiler.compiled_graph, Failing(ValueError("no")).compiled_graph
    with torch.no_grad(), pytest.raises(NoRegionsError):
        PieceFunction(piece_of(), compiler)([weight], (images(),))
    compiler.compiled_graph = compile_graph
    PieceFunction(piece_of(), compiler)([weight], (images(),))
    assert len(compiler.shapes) == 1


def test_a_compiler_that_fails_is_said_and_memory_that_lacks_is_not_hidden(weight) -> None:
    with pytest.raises(NoRegionsError, match="compiling one failed: no such kernel"):
        PieceFunction(piece_of(), Failing(ValueError("no such kernel")))([weight], (images(),))
    with pytest.raises(torch.OutOfMemoryError):
        PieceFunction(piece_of(), Failing(torch.OutOfMemoryError("full")))([weight], (images(),))
