"""Tables of steps, one row a step: pandas, polars and Arrow tables, Parquet and CSV files.

layout   the names of the columns, as a person gives them and as a table has them
header   what is beside the columns of our own tables: spaces, policies, schedules
cells    columns of a table as arrays, and back
survey   which rows are which episode
rows     where the rows are: in memory or in files
section  the episodes of a table, read chunk by chunk
write    trajectories as tables
"""

from ope_gym.data.tables.layout import TableFiles, scan_parquet

__all__ = ["TableFiles", "scan_parquet"]
