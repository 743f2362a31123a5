"""What a transformer takes: FLOPs, memory, devices, time, price, by the planner's own cost."""
