use dlock::Result;
use dlock_segment::{SegmentOutcome, segmented_lock};

#[segmented_lock(key = "stock:{sku}", segments = "20")]
async fn take(sku: u64) -> Result<SegmentOutcome<u64>> {
    Ok(SegmentOutcome::Done(sku + segment.index() as u64))
}

fn main() {
    let _ = take;
}
