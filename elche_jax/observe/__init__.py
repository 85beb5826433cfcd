"""What a run looked like: its events, reports, pages, traces and pictures."""
