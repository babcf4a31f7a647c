"""Where a run runs: command line, Ray, worker shells and rank processes. The only floor that imports Ray."""
