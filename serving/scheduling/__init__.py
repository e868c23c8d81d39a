"""What decides in serving, without sockets, tasks and clocks: courses, policies, costs."""
