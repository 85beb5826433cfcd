"""Windows over several lanes: contributions cross to the lead, what is agreed on crosses back."""
