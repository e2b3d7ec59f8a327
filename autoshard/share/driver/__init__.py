"""Real elastic jobs under one decision: started, scaled, stopped and continued by their supervisors."""
