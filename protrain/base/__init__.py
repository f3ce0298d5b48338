"""What every other folder uses: sizes, memory that counts, JSON of others, files that take their name when they are whole."""
