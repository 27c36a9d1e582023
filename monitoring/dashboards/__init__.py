"""The dashboards as code: tables of panels, and one builder that turns them into Grafana's JSON."""
