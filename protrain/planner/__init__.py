"""From what is known of a machine and of a step to a plan, by the planner in C; plans as a person reads them."""
