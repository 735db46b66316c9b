"""Questions built on evaluations: ranking, leave-one-out, contributions, planning, overlap."""
