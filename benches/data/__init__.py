"""Makers of the rows that are measured: `python3 -m benches.data.NAME` in the root of the repository."""
