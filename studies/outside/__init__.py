"""Report on problems like those that others test on: graphs, rings, tables of Gymnasium, queues."""
