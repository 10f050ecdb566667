"""The experiments of "Efficient combination of rematerialization and offloading for training DNNs"."""
