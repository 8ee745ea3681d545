"""Exit statuses of the engine process, read by its supervisor, which has no torch."""

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 3  # checkpoint or settings: another try would end the same way
EXIT_STUCK = 4  # a tick took longer than `tick_limit_s`: the device hangs, or a loop does not end
