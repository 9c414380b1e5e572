"""`moec launch`: the processes of a job."""
