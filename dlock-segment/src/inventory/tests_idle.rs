//! Ten thousand open inventories in one process are normal: what an idle one holds. And what
//! one holds at most whose server does not answer.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dlock::Dlock;
use dlock_testkit::redis::RedisServer;

use super::backing::Backing;
use super::combiner::LIMITS;
use super::{Inventory, OpenInventories, Shared};
use crate::error::Error;
use crate::store::Request;

/// The largest size of an open inventory in this process, in bytes, without its name and
/// its table entry.
const AT_MOST: usize = 1_024;

/// On a busy machine a stopped server must not end the calls before the test goes on.
const PATIENCE: Duration = Duration::from_secs(60);

async fn client() -> Option<(RedisServer, Dlock)> {
    let server = RedisServer::start()?;
    let dlock = Dlock::builder().url(&server.url()).call_timeout(PATIENCE);
    Some((server, dlock.connect().await.expect("a client")))
}

async fn sale(dlock: &Dlock, number: usize) -> Inventory {
    let sale = Inventory::builder(dlock, format!("sale-{number}")).stock(1_000).journal(10);
    sale.create().await.expect("a sale")
}

fn listed(dlock: &Dlock) -> usize {
    dlock.extension::<OpenInventories>().0.lock().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_sale_holds_nothing_of_what_it_did() {
    let Some((_server, dlock)) = client().await else { return };
    let mut sales = Vec::new();
    for number in 0..40 {
        let sale = sale(&dlock, number).await;
        let mut buying = tokio::task::JoinSet::new();
        for at in 0..600 {
            let sale = sale.clone();
            buying.spawn(async move {
                let deduct = sale.deduct(1).operation(format!("o-{at}")).send();
                if at % 7 == 0 {
                    let _ = tokio::time::timeout(std::time::Duration::ZERO, deduct).await;
                } else {
                    let _ = deduct.await.expect("an answer");
                }
            });
        }
        buying.join_all().await;
        sales.push(sale);
    }
    for sale in &sales {
        let Backing::Remote(_, combiner) = &sale.shared.backing else { panic!("not remote") };
        // The last call ends a moment after its answers were given.
        for _ in 0..2_000 {
            if std::sync::Arc::strong_count(combiner) == 1 {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(std::sync::Arc::strong_count(combiner), 1, "nothing else knows it");
        assert_eq!(combiner.footprint(), (0, 0), "batches with room, and calls under way");
        let bytes = size_of::<Shared>() + size_of_val(&**combiner);
        assert!(bytes <= AT_MOST, "{bytes} bytes for an idle sale");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_handle_takes_the_sale_from_the_list() {
    let Some((_server, dlock)) = client().await else { return };
    let mut sales = Vec::new();
    for number in 0..100 {
        sales.push(sale(&dlock, number).await);
    }
    let again = Inventory::open(&dlock, "sale-7").await.expect("the sale");
    assert!(std::sync::Arc::ptr_eq(&again.shared, &sales[7].shared), "handles share");
    assert_eq!(listed(&dlock), 100);
    drop(sales);
    assert_eq!(listed(&dlock), 1, "one is still in use");
    drop(again);
    assert_eq!(listed(&dlock), 0);
    let room = dlock.extension::<OpenInventories>().0.lock().capacity();
    assert!(room < 50, "room for {room} is kept for nobody");

    // Made again while the last handle goes: the new one stays listed.
    for _ in 0..200 {
        let old = sale(&dlock, 0).await;
        let dropping = tokio::task::spawn_blocking(move || drop(old));
        let new = Inventory::open(&dlock, "sale-0").await.expect("the sale");
        dropping.await.expect("dropped");
        assert_eq!(listed(&dlock), 1);
        drop(new);
        assert_eq!(listed(&dlock), 0);
    }
}

/// The requests of one inventory that may wait, in a test.
const PENDING: usize = 10_000;

/// A server that does not answer must not fill the memory of its clients.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_to_be_sent_are_bounded() {
    let Some((server, dlock)) = client().await else { return };
    let sale = sale(&dlock, 0).await;
    let Backing::Remote(_, combiner) = &sale.shared.backing else { panic!("not remote") };
    let send = || combiner.send(Request::Deduct { quantity: 1, operation: None, buyer: None });
    let until = tokio::time::Instant::now() + PATIENCE;
    server.pause();
    let mut waiting = Vec::new();
    let refused = loop {
        let mut sent = send();
        let mut context = Context::from_waker(Waker::noop());
        match Pin::new(&mut sent).poll(&mut context) {
            Poll::Ready(answer) => break answer,
            Poll::Pending => waiting.push(sent),
        }
        assert!(waiting.len() <= PENDING + 2 * LIMITS.weight, "there is no bound");
    };
    server.resume();
    let Err(Error::Store(error)) = refused else { panic!("{refused:?}") };
    assert_eq!(error.kind(), dlock::ErrorKind::Overloaded);
    assert!(waiting.len() >= PENDING, "refused after {}", waiting.len());
    for sent in waiting {
        let _ = sent.until(until).await.expect("it was accepted");
    }
    let _ = send().until(until).await.expect("it goes on");
}
