"""The script that FLARE's Client API starts at a site."""

from fedecider.deployment.flare import run_site

if __name__ == "__main__":
    run_site()
