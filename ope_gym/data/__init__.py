"""Recorded episodes as columns: trajectories, a buffer that grows, files that keep them.

schema        the table of columns, and what is done to all columns alike
checks        checks of columns where they enter
trajectories  Trajectories, what people and estimators work with
buffer        TrajectoryBuffer, to which a training loop appends
schedules     which policy acts when, and the numbers of policies
roster        who recorded each episode and how long it was
spaces        Gymnasium spaces as columns
space_json    Gymnasium spaces as JSON
paths         paths of files, what may be wrong with them, replacing a file as a whole
database      the SQLite file of recorded episodes: its schema, and one way to open it
encoding      the bytes of chunks of steps and of policies
store         appending episodes to a file
stored        the episodes of a file, read chunk by chunk
minari        Minari datasets
tables        tables with a row for each step, and Parquet files
"""
