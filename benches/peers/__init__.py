"""Measurements of `neighbors` beside other libraries: `python3 -m benches.peers.NAME` in the root of the repository."""
