//! The annotated handlers under concurrent HTTP requests.

mod support;

use std::thread;

use dlock_testkit::redis::RedisServer;
use support::{Service, example};

const PROGRAM: &str = env!("CARGO_BIN_EXE_annotated_handlers");

/// Sends this many requests at once and returns the answers.
fn at_once(shop: &Service, requests: usize, path: &str) -> Vec<(u16, String)> {
    thread::scope(|scope| {
        let asking: Vec<_> =
            (0..requests).map(|_| scope.spawn(|| shop.ask("POST", path))).collect();
        asking.into_iter().map(|it| it.join().expect("an answer")).collect()
    })
}

fn pay_and_buy(url: Option<&str>) {
    let shop = Service::start(&mut example(PROGRAM, url));
    let paid = at_once(&shop, 20, "/orders/7/pay");
    assert!(paid.iter().all(|answer| answer.0 == 200), "{paid:?}");
    assert_eq!(paid.iter().filter(|answer| answer.1 == "paid now\n").count(), 1, "{paid:?}");

    let bought = at_once(&shop, 16, "/stock/phone/buy");
    assert_eq!(bought.iter().filter(|answer| answer.0 == 200).count(), 10, "{bought:?}");
    assert_eq!(bought.iter().filter(|answer| answer.0 == 409).count(), 6, "{bought:?}");
    let mut left: Vec<&str> = bought
        .iter()
        .filter(|answer| answer.0 == 200)
        .filter_map(|answer| answer.1.trim_end().rsplit(", ").next())
        .collect();
    left.sort_unstable();
    left.dedup();
    assert_eq!(left.len(), 10, "each unit was sold once: {bought:?}");
}

#[test]
fn in_memory() {
    pay_and_buy(None);
}

#[test]
fn in_redis() {
    let Some(server) = RedisServer::start() else { return };
    pay_and_buy(Some(&server.url()));
}
