"""Everything that uses torch: capture, measuring, and running a schedule inside autograd."""
