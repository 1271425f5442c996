use dlock_segment::{SegmentOutcome, segmented_lock};

#[segmented_lock(key = "stock:{sku}", segments = 20)]
async fn take(sku: u64) -> Result<SegmentOutcome<u64>, String> {
    Ok(SegmentOutcome::Done(sku))
}

fn main() {
    let _ = take(7);
}
