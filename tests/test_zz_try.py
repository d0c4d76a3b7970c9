import time
from pathlib import Path
from pipeline import new_project
def test_x(tiny_model, tiny_tokenizer):
    f=Path('/tmp/pt/base'); 
    import shutil; shutil.rmtree(f,ignore_errors=True); f.mkdir()
    p=new_project(f,tiny_model(),tiny_tokenizer)
    t=time.time(); r=p.repro(); print(r.output); print(r.code, r.ran, r.restored, time.time()-t)
    t=time.time(); r=p.repro(); print(r.output); print(r.code, r.ran, r.restored, time.time()-t)
