"""Episodes that do not fit into memory, and the processes or the cluster that read them."""
