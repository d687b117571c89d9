"""Scripts that need the agents' environments are not collected."""

collect_ignore_glob = ["run_*.py", "confined/*"]
