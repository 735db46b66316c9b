"""Recorded episodes as columns: trajectories, a buffer that grows, files that keep them.

schema        the table of columns, and what is done to all columns alike
checks        checks of columns where they enter
trajectories  Trajectories, what people and estimators work with
buffer        TrajectoryBuffer, to which a training loop appends
schedules     which policy acts when, and the numbers of policies
roster        who recorded each episode and how long it was
spaces        Gymnasium spaces as columns
space_json    Gymnasium spaces as JSON
blocks        reading blocks of named arrays, the format of files
block_writer  writing them so that crashes do no harm
files         what is in the blocks: spaces, policies, changes, episodes
reader        sections of a file, read chunk by chunk
seen_files    the same file, found by several processes
minari        Minari datasets
tables        tables with a row for each step, and Parquet files
"""
