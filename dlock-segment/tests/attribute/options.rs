//! Every option, under paused time on the embedded backend.

use std::time::Duration;

use dlock::{Dlock, Error, ErrorKind, Key, key, testing};
use dlock_segment::{SegmentOutcome, segmented_lock};
use tokio::time::Instant;

type Answer = Result<SegmentOutcome<String>, Error>;

fn shown(key: &Key) -> Answer {
    Ok(SegmentOutcome::Done(key.as_str().to_owned()))
}

#[segmented_lock(key = "stock:{sku}", segments = 1)]
async fn by_template(sku: &str) -> Answer {
    shown(guard.key())
}

#[segmented_lock(key = key!("tenant:{tenant}:stock"), segments = 1, segment = place, guard = lock)]
async fn by_expression(tenant: u64) -> Answer {
    assert_eq!(place.index(), 0);
    shown(lock.key())
}

#[segmented_lock(key = "stock", segments = [("eu", 600), ("us", 400)], prefer = region)]
async fn by_region(region: &str) -> Answer {
    assert_eq!(segment.name(), Some(region));
    shown(guard.key())
}

const REGIONS: &[(&str, u32)] = &[("eu", 1), ("us", 0)];

#[segmented_lock(key = "stock", segments = REGIONS)]
async fn by_constant() -> Answer {
    shown(guard.key())
}

#[segmented_lock(key = "stock", segments = count, prefer = 3)]
async fn by_number(count: u32) -> Answer {
    shown(guard.key())
}

#[tokio::test(start_paused = true)]
async fn keys_and_segments() {
    testing::scope(async {
        let done = |text: &str| SegmentOutcome::Done(text.to_owned());
        assert_eq!(by_template("a:b").await.unwrap(), done("stock:a%3Ab:0"));
        assert_eq!(by_expression(7).await.unwrap(), done("tenant:7:stock:0"));
        assert_eq!(by_region("us").await.unwrap(), done("stock:us"));
        assert_eq!(by_region("eu").await.unwrap(), done("stock:eu"));
        assert_eq!(by_constant().await.unwrap(), done("stock:eu"));
        assert_eq!(by_number(4).await.unwrap(), done("stock:3"));
        assert_eq!(by_number(0).await.unwrap_err().kind(), ErrorKind::Invalid);
    })
    .await;
}

#[tokio::test]
async fn without_a_client() {
    assert_eq!(by_template("a").await.unwrap_err().kind(), ErrorKind::NoClient);
}

struct Shop {
    dlock: Dlock,
}

impl Shop {
    #[segmented_lock(key = "stock", segments = 1, client = self.dlock, wait = patience)]
    async fn patient(&self, patience: Duration) -> Answer {
        shown(guard.key())
    }

    #[segmented_lock(key = "stock", segments = 1, client = self.dlock, wait = "1h", policy = "sale")]
    async fn by_policy(&self) -> Answer {
        shown(guard.key())
    }

    #[segmented_lock(key = "stock", segments = 1, client = self.dlock, max_hold = "2s", ttl = "1s")]
    async fn limited(&self) -> Answer {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn client_wait_policy_max_hold() {
    let shop = Shop { dlock: Dlock::connect("memory://?policy.sale.wait=3s").await.unwrap() };
    let began = Instant::now();
    let lost = shop.limited().await.unwrap_err();
    assert_eq!((lost.kind(), began.elapsed().as_secs()), (ErrorKind::Lost, 2));

    let busy = shop.dlock.mutex("stock:0").lock().await.unwrap();
    let began = Instant::now();
    let error = shop.patient(Duration::from_secs(5)).await.unwrap_err();
    assert_eq!((error.kind(), began.elapsed().as_secs()), (ErrorKind::TimedOut, 5));
    let began = Instant::now();
    let error = shop.by_policy().await.unwrap_err();
    assert_eq!((error.kind(), began.elapsed().as_secs()), (ErrorKind::TimedOut, 3));
    drop(busy);
    assert_eq!(shop.by_policy().await.unwrap(), SegmentOutcome::Done("stock:0".to_owned()));
}

#[segmented_lock(key = "stock", segments = 3, dry_for = "5s")]
async fn remembers(order: &mut Vec<usize>, dry: Option<usize>) -> Answer {
    order.push(segment.index());
    if dry == Some(segment.index()) || dry.is_none() {
        return Ok(SegmentOutcome::Dry);
    }
    shown(guard.key())
}

#[tokio::test(start_paused = true)]
async fn dry_for() {
    testing::scope(async {
        let mut order = Vec::new();
        while !order.contains(&1) {
            let _ = remembers(&mut order, Some(1)).await.unwrap();
        }
        order.clear();
        assert_eq!(remembers(&mut order, None).await.unwrap(), SegmentOutcome::Dry);
        assert!(!order.contains(&1), "known to be dry, so it is not asked");
        let mut firsts = [false; 3];
        for _ in 0..100 {
            tokio::time::advance(Duration::from_secs(5)).await;
            order.clear();
            let _ = remembers(&mut order, None).await.unwrap();
            firsts[order[0]] = true;
        }
        assert_eq!(firsts, [true; 3], "forgotten after five seconds");
    })
    .await;
}

fn failed(error: Error) -> SegmentOutcome<String> {
    SegmentOutcome::Done(format!("failed: {:?}", error.kind()))
}

#[segmented_lock(
    key = "stock:{sku}",
    segments = 1,
    wait = "0s",
    on_busy = |_| SegmentOutcome::Done(format!("{sku} is busy")),
    on_error = failed,
    name = "sale",
)]
async fn handled(sku: String) -> SegmentOutcome<String> {
    testing::force_lost("stock:lost:0").await.ok();
    tokio::task::yield_now().await;
    SegmentOutcome::Done(guard.key().label().to_owned())
}

#[tokio::test(start_paused = true)]
async fn handlers_and_name() {
    testing::scope(async {
        assert_eq!(handled("a".into()).await, SegmentOutcome::Done("sale".into()));
        assert_eq!(handled("lost".into()).await, SegmentOutcome::Done("failed: Lost".into()));
        let busy = testing::force_busy("stock:a:0").await.unwrap();
        assert_eq!(handled("a".into()).await, SegmentOutcome::Done("a is busy".into()));
        drop(busy);
    })
    .await;
}

mod facade {
    pub(crate) use dlock_segment as segments;
}

#[segmented_lock(key = "stock", segments = 1, crate = facade::segments)]
async fn under_another_name() -> Answer {
    shown(guard.key())
}

#[tokio::test]
async fn crate_path() {
    let taken = testing::scope(under_another_name()).await;
    assert_eq!(taken.unwrap().done(), Some("stock:0".to_owned()));
}
