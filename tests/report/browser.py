"""A headless browser, driven by Selenium."""

import contextlib
import math
import shutil

from selenium import webdriver

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


def missing():
    """Return why no browser is available, or None if one is."""
    if next(filter(shutil.which, BROWSERS), None) is None:
        return "Chromium is not installed (apt-get install chromium chromium-driver)"
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed (apt-get install chromium-driver)"
    return None


@contextlib.contextmanager
def chromium(profile, downloads):
    """Start a browser with a new profile that saves files without asking."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which(next(filter(shutil.which, BROWSERS)))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        behavior = {"behavior": "allow", "downloadPath": str(downloads)}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
        yield driver
    finally:
        driver.quit()


def resize(driver, width, height=900):
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def prefer(driver, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(driver):
    """Return the messages on the console of the browser since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]


def contrast(first, second):
    """Return the contrast of two colors by WCAG 2; each is red, green and blue up to 255."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color):
    shares = [value / 255 for value in color]
    linear = [s / 12.92 if s <= 0.04045 else math.pow((s + 0.055) / 1.055, 2.4) for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
