use dlock::Result;
use dlock_segment::segmented_lock;

#[segmented_lock(key = "stock:{sku}", segments = 20)]
async fn take(sku: u64) -> Result<u64> {
    Ok(sku)
}

fn main() {
    let _ = take;
}
