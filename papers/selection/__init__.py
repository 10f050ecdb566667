"""GPU memory usage optimization for backward propagation: tables 2 and 3 and figure 5, run on a real device."""
