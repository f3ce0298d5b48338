"""protrain inside other libraries' training loops: one module for each library."""
