"""The inside of the recorders, from the rows of open episodes to the buffer and its file.

`recorder` is what users see of both recorders, `session` is what both do with finished episodes.
`single` and `batched` (with `rows` and `autoreset`) keep the open episodes of one environment and
of a vector environment. `file` appends to the file; `normalisers` warns of drifting statistics.
"""
