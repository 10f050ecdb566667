"""Where the gradients of held tensors are counted."""

from __future__ import annotations

from lowtide.runtime.measure.stage_figures import StageFigures, with_held_gradients


def test_the_gradient_of_a_held_tensor_counts_between_its_last_reader_and_its_maker():
    # stage 2 makes a tensor that stages 3 and 4 read; a variant of stage 3 takes part
    variant = ("lean", StageFigures(saving_extra_bytes=1, backward_peak_bytes=2))
    figures = [
        StageFigures(backward_peak_bytes=10),
        StageFigures(forward_extra_bytes=5),
        StageFigures(held=((2, 0),), variants=(variant,)),
        StageFigures(held=((2, 0),)),
        StageFigures(),
    ]
    found = with_held_gradients(figures, {(2, 0): 100})
    assert [figure.backward_peak_bytes for figure in found] == [10, 100, 100, 100, 0]
    # run again, stage 1 may find the gradient of the tensor that stages after it are working on
    assert [figure.forward_extra_bytes for figure in found] == [100, 105, 100, 100, 0]
    assert found[2].variants == (
        ("lean", StageFigures(forward_extra_bytes=100, saving_extra_bytes=101, backward_peak_bytes=102)),
    )
