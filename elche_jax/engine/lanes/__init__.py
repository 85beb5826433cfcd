"""Windows over several lanes: contributions cross to the lead, the agreed result crosses back."""
