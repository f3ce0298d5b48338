"""Values wherever they lie: first values, state dicts, files."""
