//! The functions that the attribute accepts.

use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;

use dlock::{Error, Result, distributed_lock, testing};
use dlock_segment::{SegmentOutcome, segmented_lock};

/// A change that the body makes is visible on the next segment.
#[segmented_lock(key = "stock", segments = 4)]
async fn gathered(mut wanted: u32, log: &mut Vec<String>) -> Result<SegmentOutcome<u32>> {
    log.push(format!("{wanted}"));
    wanted -= 1;
    Ok(if wanted == 0 { SegmentOutcome::Done(wanted) } else { SegmentOutcome::Dry })
}

#[segmented_lock(key = "stock:{name}", segments = 2)]
async fn generic<'a, T: Display + Sync, const MORE: usize>(
    name: &T,
    rows: &'a [String],
    suffix: impl Display + Sync,
) -> Result<SegmentOutcome<&'a str>> {
    let row = rows.get(segment.index() + MORE).map(String::as_str);
    let _ = format!("{suffix}");
    Ok(row.map_or(SegmentOutcome::Dry, SegmentOutcome::Done))
}

/// The value is not `Send`; the future is.
#[segmented_lock(key = "local", segments = 2)]
async fn local() -> Result<SegmentOutcome<Rc<usize>>> {
    Ok(if segment.index() == 0 { SegmentOutcome::Dry } else { SegmentOutcome::Done(Rc::new(1)) })
}

struct Shop {
    name: &'static str,
    rows: Vec<u32>,
}

impl Shop {
    #[segmented_lock(key = "rows", segments = 3)]
    async fn take(&mut self) -> Result<SegmentOutcome<u32>> {
        let row = &mut self.rows[segment.index()];
        tokio::task::yield_now().await;
        let found = std::mem::take(row);
        Ok(if found == 0 { SegmentOutcome::Dry } else { SegmentOutcome::Done(found) })
    }

    #[segmented_lock(key = "rows:{self.name}", segments = 3)]
    async fn shared(self: Arc<Self>) -> Result<SegmentOutcome<u32>> {
        Ok(SegmentOutcome::Done(self.rows[segment.index()]))
    }
}

#[async_trait::async_trait]
trait Warehouse {
    async fn pick(&self, order: String) -> Result<SegmentOutcome<String>>;
}

#[async_trait::async_trait]
impl Warehouse for Shop {
    #[segmented_lock(key = "shelf:{order}", segments = self.rows.len() as u32)]
    async fn pick(&self, order: String) -> Result<SegmentOutcome<String>> {
        if self.rows[segment.index()] == 0 {
            return Ok(SegmentOutcome::Dry);
        }
        Ok(SegmentOutcome::Done(format!("{order} from {}", segment.index())))
    }
}

/// Locks another key inside, and the same stock again.
#[segmented_lock(key = "stock:{sku}", segments = 2)]
#[distributed_lock(key = "audit:{sku}")]
async fn nested(sku: u32, again: bool) -> Result<SegmentOutcome<usize>> {
    if again {
        return Box::pin(nested(sku + 1, false)).await;
    }
    Ok(SegmentOutcome::Done(segment.index()))
}

fn assert_send(_: &impl Send) {}

#[tokio::test(start_paused = true)]
async fn signatures() {
    testing::scope(async {
        let mut log = Vec::new();
        assert_eq!(gathered(3, &mut log).await.unwrap(), SegmentOutcome::Done(0));
        assert_eq!(log, ["3", "2", "1"]);

        let rows = ["a".to_owned(), "b".to_owned()];
        let found = generic::<_, 1>(&"x", &rows, 'y').await.unwrap();
        assert_eq!(found, SegmentOutcome::Done("b"));
        let none = generic::<_, 2>(&"x", &rows, 'y').await.unwrap();
        assert_eq!(none, SegmentOutcome::Dry);

        let future = local();
        assert_send(&future);
        assert_eq!(future.await.unwrap().done().as_deref(), Some(&1));

        let mut shop = Shop { name: "a", rows: vec![0, 0, 5] };
        assert_eq!(
            shop.pick("o".into()).await.unwrap(),
            SegmentOutcome::Done("o from 2".to_owned())
        );
        assert_eq!(shop.take().await.unwrap(), SegmentOutcome::Done(5));
        assert_eq!(shop.take().await.unwrap(), SegmentOutcome::Dry);
        assert_eq!(Arc::new(shop).shared().await.unwrap(), SegmentOutcome::Done(0));

        assert!(nested(1, true).await.unwrap().done().is_some());
    })
    .await;
}

#[tokio::test]
async fn two_attributes_report_their_own_faults() {
    let none: Result<SegmentOutcome<usize>, Error> = nested(1, false).await;
    assert!(none.is_err(), "no client");
}
