"""Observation of runs: events, reports, pages, traces and plots."""
