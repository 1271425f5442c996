//! The flash sale over real HTTP, and its page in a real browser.

mod support;

use std::time::{Duration, Instant};

use dlock_testkit::redis::RedisServer;
use serde_json::Value;
use support::browser::Page;
use support::{Service, example};

const PROGRAM: &str = env!("CARGO_BIN_EXE_flash_sale");

fn stock(shop: &Service) -> Value {
    let (status, body) = shop.ask("GET", "/stock");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

/// Makes the sale, as an administrator does, and returns its creation id.
fn create(url: &str, stock: &str) -> String {
    let made = example(PROGRAM, Some(url)).arg("create").env("STOCK", stock).output();
    let made = made.expect("the example can be run");
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).expect("a number").trim().to_owned()
}

fn buy_and_pay(url: Option<&str>) {
    let mut command = example(PROGRAM, url);
    if let Some(url) = url {
        command.env("SALE", create(url, "5"));
    }
    let shop = Service::start(command.env("CROWD", "0").env("STOCK", "5"));
    assert_eq!(shop.ask("POST", "/orders/a?buyer=ann&quantity=3").0, 201);
    assert_eq!(shop.ask("POST", "/orders/a?buyer=ann&quantity=3").0, 201, "the same order again");
    assert_eq!(stock(&shop)["reserved"], 3, "is not another one");
    assert_eq!(shop.ask("POST", "/orders/b?buyer=ann&quantity=2").0, 429, "four per buyer");
    let (status, message) = shop.ask("POST", "/orders/c?buyer=bob&quantity=3");
    assert_eq!((status, &*message), (409, "only 2 units are left; order fewer\n"));
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200);
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200, "paid once, asked twice");
    assert_eq!(shop.ask("POST", "/orders/d?buyer=bob&quantity=2").0, 201);
    assert_eq!(shop.ask("DELETE", "/orders/d").0, 200);
    assert_eq!(shop.ask("POST", "/orders/d/pay").0, 410, "cancelled before");
    assert_eq!(shop.ask("POST", "/orders/d?buyer=bob&quantity=2").0, 410, "and stays cancelled");
    assert_eq!(shop.ask("DELETE", "/orders/a").0, 409, "it is paid");
    assert_eq!(shop.ask("POST", "/orders/e?buyer=bob&quantity=2").0, 201);
    // Nobody pays for it, so it comes back by itself.
    let began = Instant::now();
    while stock(&shop)["available"] != 2 {
        assert!(began.elapsed() < Duration::from_secs(30), "the payment time is two seconds");
        std::thread::sleep(Duration::from_millis(50));
    }
    let (status, message) = shop.ask("POST", "/orders/e/pay");
    assert_eq!((status, &*message), (410, "too late (Expired): the money is given back\n"));
    let again = shop.ask("POST", "/orders/e?buyer=bob&quantity=2");
    assert_eq!(again.0, 410, "delivered again, it must not be paid for: {again:?}");
    let seen = stock(&shop);
    assert_eq!((&seen["sold"], &seen["available"]), (&3.into(), &2.into()));
    let (_, audit) = shop.ask("GET", "/audit");
    let audit: Value = serde_json::from_str(&audit).expect("JSON");
    assert_eq!(audit["exact"], true, "{audit}");
    assert_eq!(audit["disagreements"], serde_json::json!([]), "{audit}");
    assert_eq!(shop.ask("POST", "/orders/f?buyer=bob&quantity=0").0, 400);
    assert_eq!(shop.ask("POST", "/orders/nobody/pay").0, 404);
}

/// An order that is delivered again after its refund is not an order any more.
fn refund(url: Option<&str>) {
    let mut command = example(PROGRAM, url);
    if let Some(url) = url {
        command.env("SALE", create(url, "5"));
    }
    let shop = Service::start(command.env("CROWD", "0").env("STOCK", "5"));
    let order = || shop.ask("POST", "/orders/a?buyer=ann&quantity=3");
    assert_eq!(order().0, 201);
    assert_eq!(shop.ask("POST", "/orders/a/refund").0, 409, "not paid yet");
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200);
    assert_eq!(order().0, 200, "already paid");
    for _ in 0..2 {
        assert_eq!(shop.ask("POST", "/orders/a/refund").0, 200);
        let (status, message) = order();
        assert_eq!(status, 410, "{message}");
        assert_eq!(shop.ask("POST", "/orders/a/pay").0, 410, "nothing is shipped for it");
        let seen = stock(&shop);
        assert_eq!((&seen["sold"], &seen["available"]), (&0.into(), &5.into()));
    }
    assert_eq!(shop.ask("POST", "/orders/nobody/refund").0, 404);
    assert_eq!(shop.ask("POST", "/orders/b?buyer=ann&quantity=4").0, 201, "under a new id");
}

#[test]
fn orders_in_memory() {
    buy_and_pay(None);
    refund(None);
}

#[test]
fn orders_in_redis() {
    for orders in [buy_and_pay, refund] {
        let Some(server) = RedisServer::start() else { return };
        orders(Some(&server.url()));
    }
}

/// The program is stopped and killed in the middle of the sale, and the sale goes on.
#[test]
fn a_sale_goes_on_after_a_stop() {
    let Some(server) = RedisServer::start() else { return };
    let url = server.url();
    let sale = create(&url, "20000");
    let start = |crowd: &str| {
        let mut program = example(PROGRAM, Some(&url));
        program.env("SALE", &sale).env("PAYMENT_SECONDS", "600");
        Service::start(program.env("CROWD", crowd))
    };
    let shop = start("4");
    assert_eq!(shop.ask("POST", "/orders/reserved?buyer=ann&quantity=3").0, 201);
    assert_eq!(shop.ask("POST", "/orders/paid?buyer=bob&quantity=3").0, 201);
    assert_eq!(shop.ask("POST", "/orders/paid/pay").0, 200);
    let began = Instant::now();
    while stock(&shop)["sold"].as_u64() < Some(30) {
        assert!(began.elapsed() < Duration::from_secs(30), "the crowd buys");
        std::thread::sleep(Duration::from_millis(10));
    }
    shop.stop();
    let shop = start("4");
    assert_eq!(shop.ask("POST", "/orders/paid?buyer=bob&quantity=3").0, 200, "already paid");
    drop(shop); // killed
    let shop = start("0");
    let before = stock(&shop);
    assert!(before["sold"].as_u64() >= Some(30), "{before}");
    assert_eq!(shop.ask("POST", "/orders/reserved/pay").0, 200, "it was still reserved");
    assert_eq!(shop.ask("POST", "/orders/paid/pay").0, 200, "it stays paid");
    let after = stock(&shop);
    let count = |stock: &Value, what: &str| stock[what].as_u64().expect("a number");
    assert_eq!(count(&after, "sold"), count(&before, "sold") + 3, "and was not sold twice");
    let all: u64 = ["available", "reserved", "sold"].map(|what| count(&after, what)).iter().sum();
    assert_eq!(all, 20_000, "no unit came or went");
    let (_, audit) = shop.ask("GET", "/audit");
    let audit: Value = serde_json::from_str(&audit).expect("JSON");
    assert_eq!((&audit["exact"], &audit["disagreements"]), (&true.into(), &serde_json::json!([])));
}

/// The server came back empty: nothing is sold again, neither by the service that runs nor
/// by one that starts.
#[test]
fn a_lost_sale_is_not_sold_again() {
    let Some(server) = RedisServer::start() else { return };
    let sale = create(&server.url(), "5");
    let mut command = example(PROGRAM, Some(&server.url()));
    command.env("CROWD", "0").env("SALE", &sale);
    let shop = Service::start(&mut command);
    assert_eq!(shop.ask("POST", "/orders/a?buyer=ann&quantity=3").0, 201);
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200);
    assert_eq!(server.cli(&["FLUSHALL"]), "OK");
    for (method, path) in
        [("POST", "/orders/b?buyer=bob&quantity=1"), ("POST", "/orders/a/pay"), ("GET", "/stock")]
    {
        let (status, body) = shop.ask(method, path);
        assert_eq!(status, 503, "{path}: {body}");
        assert!(body.contains("lost"), "{body}");
    }
    let again = command.env("PORT", "0").output().expect("the example can be run");
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("lost"), "{again:?}");
    assert_eq!(server.keys(), [""; 0], "nothing was made");
    // An administrator decides to make it again, and the lost order is sent again.
    let new = create(&server.url(), "5");
    assert_ne!(new, sale);
    let shop = Service::start(command.env("SALE", new));
    assert_eq!(shop.ask("POST", "/orders/a?buyer=ann&quantity=3").0, 201);
    assert_eq!(shop.ask("POST", "/orders/a/pay").0, 200);
    assert_eq!(stock(&shop)["available"], 2);
}

/// What the page shows.
fn shown(page: &mut Page) -> [u64; 3] {
    ["updates", "sold", "available"].map(|id| {
        let text = page.value(&format!("document.getElementById('{id}')?.textContent ?? ''"));
        let digits: String = text.as_str().unwrap_or_default().replace(',', "");
        digits.parse().unwrap_or(0)
    })
}

#[test]
fn the_page_shows_the_segments_draining() {
    let shop = Service::start(example(PROGRAM, None).env("STOCK", "100000"));
    let Some(mut page) = Page::open(&format!("http://{}/", shop.address)) else { return };
    let began = Instant::now();
    let mut wait_for = |is_so: &dyn Fn([u64; 3]) -> bool| loop {
        let seen = shown(&mut page);
        if is_so(seen) {
            return seen;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the page stands still: {seen:?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let [updates, sold, available] = wait_for(&|[updates, sold, _]| updates > 0 && sold > 0);
    wait_for(&|now| now[0] > updates && now[1] > sold && now[2] < available);
    let bars = page.value("document.querySelectorAll('.segment').length");
    assert_eq!(bars, 16);
    assert_eq!(page.console, Vec::<String>::new(), "something on the console");
}
