"""The command line: benchmarks beside their floors and peers, as text and as JSON."""
