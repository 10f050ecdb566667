"""Weight offloading strategies for training large DNN models: table 1 and figure 4."""
