//! The flash sale over real HTTP, and its page in a real browser.

mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use dlock_testkit::redis::RedisServer;
use serde_json::Value;
use support::{Service, example};

const PROGRAM: &str = env!("CARGO_BIN_EXE_flash_sale");

fn stock(shop: &Service) -> Value {
    let (status, body) = shop.ask("GET", "/stock");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

fn buy_and_pay(url: Option<&str>) {
    let shop = Service::start(example(PROGRAM, url).env("CROWD", "0").env("STOCK", "5"));
    assert_eq!(shop.ask("POST", "/orders/a?buyer=ann&quantity=3").0, 201);
    assert_eq!(shop.ask("POST", "/orders/a?buyer=ann&quantity=3").0, 201, "the same order again");
    assert_eq!(stock(&shop)["reserved"], 3, "is not another one");
    assert_eq!(shop.ask("POST", "/orders/b?buyer=ann&quantity=2").0, 429, "four per buyer");
    assert_eq!(shop.ask("POST", "/orders/c?buyer=bob&quantity=3").0, 409, "two are left");
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200);
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200, "paid once, asked twice");
    assert_eq!(shop.ask("POST", "/orders/d?buyer=bob&quantity=2").0, 201);
    assert_eq!(shop.ask("DELETE", "/orders/d").0, 200);
    assert_eq!(shop.ask("POST", "/orders/d/pay").0, 410, "given back");
    assert_eq!(shop.ask("POST", "/orders/e?buyer=bob&quantity=2").0, 201);
    // Nobody pays for it, so it comes back by itself.
    let began = Instant::now();
    while stock(&shop)["available"] != 2 {
        assert!(began.elapsed() < Duration::from_secs(30), "the payment time is two seconds");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(shop.ask("POST", "/orders/e/pay").0, 410, "too late");
    let seen = stock(&shop);
    assert_eq!((&seen["sold"], &seen["available"]), (&3.into(), &2.into()));
    assert_eq!(seen["clean"], true, "{seen}");
    assert_eq!(shop.ask("POST", "/orders/f?buyer=bob&quantity=0").0, 400);
    assert_eq!(shop.ask("POST", "/orders/nobody/pay").0, 404);
}

#[test]
fn orders_in_memory() {
    buy_and_pay(None);
}

#[test]
fn orders_in_redis() {
    let Some(server) = RedisServer::start() else { return };
    buy_and_pay(Some(&server.url()));
}

/// The page of a sale with a crowd, as Chromium sees it after some seconds.
#[test]
fn the_page_moves() {
    let version = Command::new("chromium").arg("--version").output();
    if !dlock_testkit::servers::found("chromium", version.is_ok_and(|it| it.status.success())) {
        return;
    }
    let shop = Service::start(example(PROGRAM, None).env("STOCK", "2000"));
    let profile = std::env::temp_dir().join(format!("dlock-chromium-{}", std::process::id()));
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--disable-extensions", "--no-first-run", "--disable-background-networking"])
        .args(["--enable-logging=stderr", "--timeout=4000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("http://{}/", shop.address))
        .output()
        .expect("chromium can be run");
    let _ = std::fs::remove_dir_all(&profile);
    let page = String::from_utf8_lossy(&output.stdout);
    let log = String::from_utf8_lossy(&output.stderr);
    let number = |id: &str| -> u64 {
        let from = page.split_once(&format!("id=\"{id}\">")).expect(id).1;
        let text = from.split('<').next().expect("its text").replace(',', "");
        text.parse().unwrap_or_else(|_| panic!("{id} is no number: {text}; {log}"))
    };
    assert!(number("updates") >= 2, "the numbers do not move");
    assert!(number("sold") > 0, "nothing was sold");
    assert!(number("available") < 2_000);
    assert!(page.contains(">agree<"), "the books do not agree");
    assert_eq!(page.matches("class=\"segment\"").count(), 16);
    let console: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(console.is_empty(), "{console:?}");
}
