//! Requests in flight share calls, each with its own answer; what the server has to
//! do for a call does not grow with the requests in it.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::collections::HashSet;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use common::{Place, clean_audit, counts};
use dlock_segment::{Deduction, Inventory};
use dlock_testkit::redis::RedisServer;

/// The largest number of requests of one call.
const MOST: usize = 256;

/// The script calls since the last reset, and the commands that ran inside them.
fn calls(server: &RedisServer) -> (usize, usize) {
    let (mut scripts, mut inside) = (0, 0);
    for line in server.cli(&["INFO", "commandstats"]).lines() {
        let Some((command, numbers)) = line.trim().split_once(":calls=") else { continue };
        let (count, _) = numbers.split_once(',').expect("more numbers");
        let count: usize = count.parse().expect("a number");
        match command {
            "cmdstat_evalsha" | "cmdstat_eval" => scripts += count,
            // What the clients and this look say for themselves.
            "cmdstat_info" | "cmdstat_ping" | "cmdstat_config|resetstat" => {}
            _ => inside += count,
        }
    }
    server.cli(&["CONFIG", "RESETSTAT"]);
    (scripts, inside)
}

/// Sends all requests while the server is paused.
async fn at_once(
    server: &RedisServer,
    sale: &Inventory,
    ids: std::ops::Range<usize>,
) -> Vec<(usize, Deduction)> {
    server.pause();
    let mut requests = tokio::task::JoinSet::new();
    let (wanted, begun) = (ids.len(), Arc::new(AtomicUsize::new(0)));
    for number in ids {
        let (sale, begun) = (sale.clone(), begun.clone());
        requests.spawn(async move {
            let mut sent = pin!(sale.deduct(1).operation(format!("o-{number}")).send());
            let first = poll_fn(|cx| Poll::Ready(sent.as_mut().poll(cx))).await;
            begun.fetch_add(1, Ordering::Relaxed);
            let sent = match first {
                Poll::Ready(sent) => sent,
                Poll::Pending => sent.await,
            };
            (number, sent.expect("the server goes on"))
        });
    }
    while begun.load(Ordering::Relaxed) < wanted {
        tokio::task::yield_now().await;
    }
    server.resume();
    requests.join_all().await
}

#[tokio::test]
async fn requests_share_calls() {
    let Some(place) = Place::redis().await else { return };
    let server = place.server.as_ref().unwrap();
    let sale = place.sale(2_000, 8).await;
    at_once(server, &sale, 0..1).await; // the scripts are there
    calls(server);
    at_once(server, &sale, 1..2).await;
    let (alone, inside_one) = calls(server);
    assert_eq!(alone, 1, "a lone request leaves at once");

    let answers = at_once(server, &sale, 2..1_802).await;
    let (shared, inside) = calls(server);
    assert!((1_800_usize.div_ceil(MOST)..=20).contains(&shared), "{shared} calls");
    let mut receipts = HashSet::new();
    for (number, answer) in answers {
        let Deduction::Taken(receipt) = answer else { panic!("{answer:?}") };
        assert_eq!(receipt.operation.as_deref(), Some(format!("o-{number}").as_str()));
        assert_eq!(receipt.quantity, 1);
        receipts.insert(number);
    }
    assert_eq!(receipts.len(), 1_800);
    assert!(inside <= shared * (inside_one + 16), "{inside} commands, alone {inside_one}");

    // A call serves some of its requests and refuses others; each gets its own answer.
    let answers = at_once(server, &sale, 1_802..2_202).await;
    let served = answers.iter().filter(|(_, answer)| matches!(answer, Deduction::Taken(_))).count();
    assert_eq!(served, 198);
    assert!(calls(server).0 <= 10);
    assert_eq!(counts(&sale).await, (0, 0, 2_000));
    clean_audit(&sale).await;
}
