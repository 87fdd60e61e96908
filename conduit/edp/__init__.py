"""The experience data plane's control points: ingestion, placement and delivery."""
