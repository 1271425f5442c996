use dlock::Result;
use dlock_segment::{SegmentOutcome, segmented_lock};

#[segmented_lock(key = "stock:{sku}", segments = 20)]
async fn take(sku: u64) -> Result<SegmentOutcome<u64>> {
    let shared = std::rc::Rc::new(sku);
    std::future::ready(()).await;
    Ok(SegmentOutcome::Done(*shared))
}

fn main() {
    fn sent(_: impl Send) {}
    sent(take(7));
}
