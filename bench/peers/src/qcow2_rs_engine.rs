//! qcow2-rs on its io_uring back end.

use crate::load::Load;
use qcow2_rs::dev::Qcow2DevParams;
use qcow2_rs::helpers::Qcow2IoBuf;
use qcow2_rs::qcow2_default_params;
use qcow2_rs::utils::qcow2_setup_dev_uring;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

pub(crate) fn run(image: &Path, load: Load) -> Result<Duration, String> {
    tokio_uring::start(measure(image, load))
}

async fn measure(image: &Path, load: Load) -> Result<Duration, String> {
    let parameters = qcow2_default_params!(!load.write, true);
    let disk = qcow2_setup_dev_uring(image, &parameters).await.map_err(|e| format!("{e:?}"))?;
    let (disk, load) = (Rc::new(disk), Rc::new(load));
    let size = disk.info.virtual_size();
    let start = Instant::now();
    let tasks: Vec<_> = (0..load.depth)
        .map(|_| {
            let (disk, load) = (disk.clone(), load.clone());
            tokio_uring::spawn(async move {
                let mut buffer = Qcow2IoBuf::<u8>::new(load.block);
                buffer.fill(0x5a);
                while let Some(offset) = load.next(size) {
                    if load.write {
                        disk.write_at(&buffer, offset).await.map_err(|e| format!("{e:?}"))?;
                    } else {
                        disk.read_at(&mut buffer, offset).await.map_err(|e| format!("{e:?}"))?;
                    }
                }
                Ok::<(), String>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.map_err(|e| e.to_string())??;
    }
    if load.write {
        disk.flush_meta().await.map_err(|e| format!("{e:?}"))?;
    }
    Ok(start.elapsed())
}
