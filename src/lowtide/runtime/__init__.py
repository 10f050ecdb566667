"""Everything that touches torch: capture, measuring, and running a schedule inside autograd."""
