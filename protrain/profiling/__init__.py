"""Times: of a machine, of a rehearsal, of real steps, and what they correct in a profile."""
