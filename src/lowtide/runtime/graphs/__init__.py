"""Steps of training replayed as CUDA graphs: the host launches two graphs instead of thousands of kernels."""
